"""The comparison with others: that they get our weights, and that everybody answers alike."""

from __future__ import annotations

import json
import sys

import compare_peers
import pytest
import torch
from conftest import ARCHITECTURES
from test_convert_hf_checkpoint import hf_model

import checkpoint
from convert_hf_checkpoint import convert
from errors import UserError
from quantize import main as quantize


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_transformers_gets_the_weights_back(tmp_path, name):
    theirs = hf_model(tmp_path / "hf", name)
    convert(tmp_path / "hf", tmp_path / "ours", None)
    rebuilt = compare_peers.transformers_model(tmp_path / "ours", torch.float32)
    tokens = torch.randint(0, 131, (1, 60), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(rebuilt(tokens).logits, theirs(tokens).logits, atol=1e-5, rtol=0)


def test_a_quantized_checkpoint_is_not_taken_apart(tmp_path, monkeypatch):
    hf_model(tmp_path / "hf", "llama3")
    convert(tmp_path / "hf", tmp_path / "ours", None)
    monkeypatch.setattr("sys.argv", ["quantize.py", "--checkpoint", str(tmp_path / "ours"), "--out", str(tmp_path / "int8")])
    quantize()
    with pytest.raises(UserError, match="is int8; transformers needs"):
        compare_peers.their_weights(tmp_path / "int8")


def test_everybody_says_the_same_on_the_demo(capsys, monkeypatch):
    command = "--draft demo/draft --judge demo/judge.pt --no-compile --new-tokens 12 --repeat 1 --json"
    monkeypatch.setattr("sys.argv", ["compare_peers.py", *command.split()])
    monkeypatch.chdir(checkpoint.__file__.rsplit("/", 1)[0])
    compare_peers.main()
    printed = capsys.readouterr()
    rows = json.loads(printed.out.splitlines()[-1])["peers"]
    assert {"ours: plain", "ours: standard", "transformers: plain", "transformers: assisted"} < set(rows)
    assert all(row["as_ours"] == 12 for name, row in rows.items() if name != "ours: judge")
    assert "llama.cpp is left out: it needs --gguf" in printed.err


def test_a_peer_that_is_not_installed_is_left_out_with_a_word(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("sys.argv", ["compare_peers.py", "--no-compile", "--new-tokens", "3", "--repeat", "1"])
    compare_peers.main()
    printed = capsys.readouterr()
    assert "transformers is left out: it isn't installed" in printed.err
    assert "ours: plain" in printed.out


@pytest.mark.parametrize(
    "command, said", [("--new-tokens 1", "--new-tokens is 1"), ("--gguf nothing", "--gguf nothing is no file")]
)
def test_mistakes_are_told(monkeypatch, command, said):
    monkeypatch.setattr("sys.argv", ["compare_peers.py", *command.split()])
    with pytest.raises(UserError, match=said):
        compare_peers.main()
