"""The table of known models, and checkpoints of random weights in their shapes."""

from __future__ import annotations

import sys

import fake_checkpoint
import pytest
import shapes
import torch

import checkpoint
import convert_hf_checkpoint
from errors import UserError
from model import Config


@pytest.mark.parametrize("name", shapes.ROWS)
def test_a_shape_survives_its_own_configuration(name):
    assert Config.from_hf(fake_checkpoint.hf_config(shapes.shape(name))) == shapes.shape(name)


@pytest.mark.parametrize("architecture, tied", [("Llama", True), ("Qwen2", False), ("Qwen3", True)])
def test_a_checkpoint_of_random_weights_converts_and_loads(tmp_path, monkeypatch, architecture, tied):
    row = (architecture, 32, 3, 4, 2, 48, 96, 256, 1e4, tied)
    monkeypatch.setitem(shapes.ROWS, "tiny", row)
    argv = ["fake_checkpoint.py", "tiny", "--out", str(tmp_path / "hf"), "--shard-gb", "2e-5"]
    monkeypatch.setattr(sys, "argv", argv)
    fake_checkpoint.main()
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    convert_hf_checkpoint.convert(tmp_path / "hf", tmp_path / "ours", None)
    model = checkpoint.load_model(tmp_path / "ours", torch.float32)
    logits = model(torch.tensor([[1, 2, 3]]))
    assert logits.shape == (1, 3, 96) and 0.1 < logits.std() < 10
    with pytest.raises(UserError, match="is not empty"):
        fake_checkpoint.main()
