"""Checkpoints: what tells two apart, configurations that can't be, and what an interrupted writer leaves."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import hf_config, tiny

import checkpoint
from errors import UserError


def save(folder, name="llama3", change=None, dtype=torch.float32):
    weights = {key: value.to(dtype) for key, value in tiny(name).state_dict().items()}
    if change is not None:
        weights[change] = weights[change] + 1
    checkpoint.save_checkpoint(folder, hf_config(name), weights)
    return folder


def test_a_fingerprint_tells_any_changed_weight_and_no_dtype(tmp_path):
    own = checkpoint.fingerprint(save(tmp_path / "own"))
    assert own == checkpoint.fingerprint(save(tmp_path / "half", dtype=torch.bfloat16))
    names = list(tiny().state_dict())
    assert len(names) > 15
    for i, name in enumerate(names):
        assert checkpoint.fingerprint(save(tmp_path / str(i), change=name)) != own, name


JUNK = [None, "", "linear", -1, 0, 0.5, "4", [], [1], {}, {"a": 1}, float("inf"), True, 10**30]


@pytest.mark.parametrize("key", [
    "architectures", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling",
    "sliding_window", "hidden_act",
])  # fmt: skip
def test_a_damaged_configuration_is_told_in_one_line(tmp_path, key):
    for junk in JUNK:
        (tmp_path / "config.json").write_text(json.dumps({**hf_config("llama3"), key: junk}))
        try:
            config = checkpoint.load_config(tmp_path)
            assert config.n_heads % config.n_kv_heads == 0 and config.norm_eps > 0 and config.rope_theta > 0
        except UserError as error:
            assert str(tmp_path) in str(error)


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
def test_rope_scaling_that_cant_be_is_refused(tmp_path, key):
    for junk in [0, -1, "x", None, float("nan"), []]:
        raw = hf_config("llama3")
        (tmp_path / "config.json").write_text(json.dumps({**raw, "rope_scaling": {**raw["rope_scaling"], key: junk}}))
        with pytest.raises(UserError, match=key):
            checkpoint.load_config(tmp_path)


def test_what_an_interrupted_writer_left_is_never_read(tmp_path):
    folder = tmp_path / "m"
    writer = checkpoint.CheckpointWriter(folder, tied=False, shard_bytes=20_000)
    for name, value in tiny().state_dict().items():
        writer.add(name, value * 2)
    writer.close(hf_config("llama3"))
    (folder / "config.json").unlink()  # killed between the index and config.json
    assert len(list(folder.glob("*.safetensors"))) > 2
    save(folder)
    loaded = checkpoint.load_model(folder, torch.float32)
    assert all(torch.equal(value, tiny().state_dict()[name]) for name, value in loaded.state_dict().items())
    assert len(list(folder.glob("*.safetensors"))) == 1


def test_a_writer_touches_nobody_elses_weights(tmp_path):
    from safetensors.torch import save_file

    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="not of an interrupted run"):
        checkpoint.CheckpointWriter(tmp_path, tied=False)
    assert (tmp_path / "model.safetensors").exists()
