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
import llm
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


def test_for_a_quantized_checkpoint_transformers_is_left_out(tmp_path, monkeypatch, capsys):
    command = ["quantize.py", "--checkpoint", str(llm.DEMO / "target"), "--out", str(tmp_path / "int8")]
    monkeypatch.setattr("sys.argv", command)
    quantize()
    command = ["compare_peers.py", "--target", str(tmp_path / "int8"), "--no-compile", "--new-tokens", "3", "--repeat", "1"]
    monkeypatch.setattr("sys.argv", command)
    compare_peers.main()
    assert "transformers is left out: it has no weights of this form" in capsys.readouterr().err


@pytest.mark.parametrize("block", [1, 5, 17, 26])
def test_speeds_are_those_of_the_long_run(monkeypatch, block):
    """A made-up peer that gives ``block`` tokens every 10 ms after a prompt of 50 ms."""
    clock = [0.0]

    def complete(prompt, n):
        clock[0] += 0.05 + 0.01 * -(-n // block)
        return [0] * n

    monkeypatch.setattr(compare_peers.time, "perf_counter", lambda: clock[0])
    for n in (130, 260):
        rows = compare_peers.measure([compare_peers.Peer("ours: plain", complete)], [[1]], 2, n)
        assert rows["ours: plain"]["tokens_per_s"][0] == pytest.approx(100 * block, rel=0.15 if n == 130 else 0.08)


def test_who_was_held_up_in_every_text_has_no_speed_and_costs_nobody_theirs(monkeypatch):
    clock = [0.0]

    def peer(name, seconds):
        def complete(prompt, n):
            clock[0] += seconds(n)
            return [0] * n

        return compare_peers.Peer(name, complete)

    monkeypatch.setattr(compare_peers.time, "perf_counter", lambda: clock[0])
    peers = [peer("ours: plain", lambda n: n), peer("other", lambda n: 100 - n)]
    rows = compare_peers.measure(peers, [[1]], 2, 10)
    assert rows["ours: plain"]["tokens_per_s"][0] == 1 and rows["other"]["tokens_per_s"] is None
    assert "| other | nan" in compare_peers.table(rows)


def test_the_static_cache_is_transformers_own_text(tmp_path):
    """Compiled, with one cache for all texts: the same tokens as plain decoding."""
    import transformers

    hf_model(tmp_path / "hf", "llama3")
    convert(tmp_path / "hf", tmp_path / "ours", None)
    model = compare_peers.transformers_model(tmp_path / "ours", torch.float32)
    cache = transformers.StaticCache(config=model.config, max_cache_len=60)
    for prompt in ([5, 6, 7], [9, 8, 7, 6, 5]):
        ids = torch.tensor([prompt])
        cache.reset()
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(ids, past_key_values=cache, **options), model.generate(ids, **options))


def test_everybody_says_the_same_on_the_demo(capsys, monkeypatch):
    command = "--draft demo/draft --judge demo/judge.pt --rules plain,standard@8,judge@4"
    command += " --no-compile --new-tokens 12 --repeat 1 --json"
    monkeypatch.setattr("sys.argv", ["compare_peers.py", *command.split()])
    monkeypatch.chdir(checkpoint.__file__.rsplit("/", 1)[0])
    compare_peers.main()
    printed = capsys.readouterr()
    rows = json.loads(printed.out.splitlines()[-1])["peers"]
    assert {"ours: plain", "ours: standard@8", "ours: judge@4", "transformers: plain", "transformers: assisted"} <= set(rows)
    assert all(row["as_ours"] == 24 for name, row in rows.items() if name != "ours: judge@4")
    assert "llama.cpp is left out: it needs --gguf" in printed.err


def test_a_peer_that_is_not_installed_is_left_out_with_a_word(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("sys.argv", ["compare_peers.py", "--no-compile", "--new-tokens", "3", "--repeat", "1"])
    compare_peers.main()
    printed = capsys.readouterr()
    assert "transformers is left out: it isn't installed" in printed.err
    assert "ours: plain" in printed.out


@pytest.mark.parametrize(
    "command, said",
    [
        ("--new-tokens 0", "--new-tokens is 0"),
        ("--gguf nothing", "--gguf nothing is no file"),
        ("--judge demo/judge.pt", "needs a --draft"),
        ("--draft-gguf README.md", "needs a --gguf"),
        ("--rules plain,standard", "--rules plain,standard needs a --draft"),
        ("--draft demo/draft --rules standard", "--rules standard lacks plain"),
        ("--draft demo/draft --rules plain,judge", "needs --judge FILE"),
        ("--draft demo/draft --rules plain,standard@0", "@M must be a whole number of at least 1"),
        ("--draft demo/draft --rules plain,plain", "twice"),
        ("--draft demo/draft --rules plain,standard,standard@8", "twice"),
    ],
)
def test_mistakes_are_told(monkeypatch, command, said):
    monkeypatch.setattr("sys.argv", ["compare_peers.py", *command.split()])
    with pytest.raises(UserError, match=said):
        compare_peers.main()
