"""Conversion from Hugging Face's files, and our logits against transformers' on the same weights."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from conftest import ARCHITECTURES, hf_config
from safetensors.torch import load_file, save_file

import checkpoint
from convert_hf_checkpoint import convert
from errors import UserError


def hf_model(folder, name, shard_size="1GB", **changes):
    """A random transformers model of order-1 logits, saved as Hugging Face does."""
    raw = hf_config(name, **changes)
    config = getattr(transformers, raw["architectures"][0].replace("ForCausalLM", "Config"))(**raw)
    torch.manual_seed(0)
    model = getattr(transformers, raw["architectures"][0])(config).eval()
    for parameter_name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in parameter_name), std=0.15)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_logits_agree_with_transformers(tmp_path, name, shard_size):
    theirs = hf_model(tmp_path / "hf", name, shard_size)
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    convert(tmp_path / "hf", tmp_path / "ours", None)
    ours = checkpoint.load_model(tmp_path / "ours", torch.float32)
    tokens = torch.randint(0, 131, (1, 200), generator=torch.Generator().manual_seed(1))
    expected = theirs(tokens).logits
    assert 0.1 < expected.std() < 10
    torch.testing.assert_close(ours(tokens), expected, atol=1e-4, rtol=0)


def test_bias_and_config_generation_of_saved_files(tmp_path):
    hf_model(tmp_path / "hf", "qwen2")
    convert(tmp_path / "hf", tmp_path / "ours", torch.bfloat16)
    weights = load_file(tmp_path / "ours" / "model.safetensors")
    assert weights["layers.0.wqkv.bias"].shape == (10 * 8,)
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}
    assert "output.weight" not in weights


def test_our_files_are_not_converted_twice_nor_theirs_read(tmp_path):
    hf_model(tmp_path / "hf", "llama2")
    with pytest.raises(UserError, match="convert_hf_checkpoint.py"):
        checkpoint.load_model(tmp_path / "hf", torch.float32)
    convert(tmp_path / "hf", tmp_path / "ours", None)
    with pytest.raises(UserError, match="already"):
        convert(tmp_path / "ours", tmp_path / "again", None)
    with pytest.raises(UserError, match="is a checkpoint already"):
        convert(tmp_path / "hf", tmp_path / "ours", None)


@pytest.mark.parametrize("fault", ["missing part", "unknown name", "missing shard", "cut short", "architecture"])
def test_faulty_sources_leave_no_checkpoint(tmp_path, fault):
    source = tmp_path / "hf"
    hf_model(source, "llama3", "20KB" if fault == "missing shard" else "1GB")
    path = source / "model.safetensors"
    match = ""
    if fault == "missing shard":
        next(source.glob("model-00002*")).unlink()
        match = "model-00002"
    elif fault == "cut short":
        path.write_bytes(path.read_bytes()[:-100])
        match = "model.safetensors.*cut short"
    elif fault == "architecture":
        raw = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**raw, "architectures": ["FalconForCausalLM"]}))
        match = "FalconForCausalLM"
    else:
        weights = load_file(path)
        moved = weights.pop("model.layers.1.self_attn.k_proj.weight")
        if fault == "unknown name":
            weights["model.layers.1.self_attn.kk_proj.weight"] = moved
        save_file(weights, path)
        match = "layers.1.wqkv.weight needs 3" if fault == "missing part" else "kk_proj"
    with pytest.raises(UserError, match=match):
        convert(source, tmp_path / "ours", None)
    assert not (tmp_path / "ours" / "config.json").exists()
