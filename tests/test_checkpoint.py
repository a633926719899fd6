"""Checkpoints: what tells two apart, configurations that can't be, fewer bits, and what an interrupted writer leaves."""

from __future__ import annotations

import json
import os
from collections import namedtuple

import pytest
import torch
from conftest import ROOT, hf_config, tiny
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import checkpoint
import quantize
import writer as writer_module
from errors import UserError
from files import hold
from linear import MODES
from writer import CheckpointWriter, Step, save_checkpoint, stream_checkpoint


def save(folder, name="llama3", change=None, dtype=torch.float32):
    weights = {key: value.to(dtype) for key, value in tiny(name).state_dict().items()}
    if change is not None:
        weights[change] = weights[change] + 1
    save_checkpoint(folder, hf_config(name), weights)
    return folder


def test_a_fingerprint_tells_any_changed_weight_and_no_dtype(tmp_path):
    own = checkpoint.fingerprint(save(tmp_path / "own"))
    assert own == checkpoint.fingerprint(save(tmp_path / "half", dtype=torch.bfloat16))
    small = save(tmp_path / "small", dtype=torch.bfloat16)
    weights = {name: value * 1e-6 for name, value in load_file(small / "model.safetensors").items()}  # beyond float16's reach
    for name, dtype in (("small-bf16", torch.bfloat16), ("small-fp16", torch.float16)):
        steps = [Step(key, value.nbytes, lambda value=value: value) for key, value in weights.items()]
        writer = CheckpointWriter(tmp_path / name, tied=False)
        stream_checkpoint(writer, steps, hf_config("llama3"), dtype)
    assert checkpoint.fingerprint(tmp_path / "small-bf16") == checkpoint.fingerprint(tmp_path / "small-fp16") != own
    names = list(tiny().state_dict())
    assert len(names) > 15
    for i, name in enumerate(names):
        assert checkpoint.fingerprint(save(tmp_path / str(i), change=name)) != own, name


def test_a_name_is_sought_here_and_then_beside_the_scripts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "BESIDE", tmp_path / "project" / "checkpoints")
    for folder in (checkpoint.ROOT / "Tiny-1B", checkpoint.BESIDE / "Tiny-1B", checkpoint.BESIDE / "Tiny-8B"):
        save(folder)
    assert checkpoint.find_checkpoint("1b") == checkpoint.find_checkpoint("Tiny-1B") == checkpoint.ROOT / "Tiny-1B"
    assert checkpoint.find_checkpoint("8B") == checkpoint.find_checkpoint("Tiny-8B") == checkpoint.BESIDE / "Tiny-8B"
    with pytest.raises(UserError, match=f"checkpoints/ holds Tiny-1B and {checkpoint.BESIDE}/ holds Tiny-1B, Tiny-8B$"):
        checkpoint.find_checkpoint("70B")


def test_a_copy_in_fewer_bits_is_not_in_its_originals_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("Big-8B-Chat", "Big-8B-Chat-int8", "Big-8B-Chat-int4-g32", "Small-1B-int8"):
        save(checkpoint.ROOT / name)
    assert checkpoint.find_checkpoint("8B") == checkpoint.ROOT / "Big-8B-Chat"
    assert checkpoint.find_checkpoint("8B-Chat-int8") == checkpoint.ROOT / "Big-8B-Chat-int8"
    assert checkpoint.find_checkpoint("1B") == checkpoint.ROOT / "Small-1B-int8"
    save(checkpoint.ROOT / "Big-8B")
    with pytest.raises(UserError, match="'big' fits several .*: Big-8B, Big-8B-Chat;"):
        checkpoint.find_checkpoint("big")


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
    writer = CheckpointWriter(folder, tied=False, shard_bytes=20_000)
    for name, value in tiny().state_dict().items():
        writer.add(name, value * 2)
    writer.close(hf_config("llama3"))
    (folder / "config.json").unlink()  # killed between the index and config.json
    assert len(list(folder.glob("*.safetensors"))) > 2
    save(folder)
    loaded = checkpoint.load_model(folder, torch.float32)
    assert all(torch.equal(value, tiny().state_dict()[name]) for name, value in loaded.state_dict().items())
    assert len(list(folder.glob("*.safetensors"))) == 1


def test_a_checkpoint_that_another_process_just_ended_is_left_alone(tmp_path, monkeypatch):
    def late(folder):
        save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text("{}")
        return hold(folder)

    monkeypatch.setattr("writer.hold", late)
    with pytest.raises(UserError, match="is a checkpoint already"):
        CheckpointWriter(tmp_path, tied=False)
    assert (tmp_path / "model.safetensors").exists()
    os.close(hold(tmp_path))


def test_a_writer_touches_nobody_elses_weights(tmp_path):
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="not of an interrupted run"):
        CheckpointWriter(tmp_path, tied=False)
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["llama3", "qwen2", "llama-bias"])  # not tied, tied, with biases
@pytest.mark.parametrize("mode", MODES)
def test_a_quantized_checkpoint_is_what_quantizing_at_load_gives(tmp_path, name, mode):
    plain, made = save(tmp_path / "plain", name), tmp_path / "made"
    quantize.quantize(plain, made, mode)
    at_load = checkpoint.load_model(plain, torch.float32, quantization=mode)
    for loaded in (checkpoint.load_model(made, torch.float32), checkpoint.load_model(made, torch.float32, quantization=mode)):
        assert loaded.quantization == mode and loaded.state_dict().keys() == at_load.state_dict().keys()
        for key, value in loaded.state_dict().items():
            assert value.dtype == at_load.state_dict()[key].dtype and torch.equal(value, at_load.state_dict()[key]), key
    assert checkpoint.fingerprint(made) == checkpoint.fingerprint(plain)
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    exact, got = checkpoint.load_model(plain, torch.float32)(tokens), at_load(tokens)
    assert 1e-3 < (got - exact).std() / exact.std() < (0.1 if mode == "int8" else 0.8)
    untouched = [
        key for key in load_file(made / "model.safetensors") if key.endswith(("norm.weight", ".bias")) or key.startswith("embed")
    ]
    for key in untouched:
        assert torch.equal(load_file(made / "model.safetensors")[key], load_file(plain / "model.safetensors")[key])


def test_what_isnt_quantized_as_it_says_is_refused(tmp_path):
    plain, made = save(tmp_path / "plain"), tmp_path / "made"
    quantize.quantize(plain, made, "int8")
    with pytest.raises(UserError, match="is int8 already"):
        quantize.quantize(made, tmp_path / "twice", "int8")
    with pytest.raises(UserError, match="can't be quantized to int4-g32"):
        checkpoint.load_model(made, torch.float32, quantization="int4-g32")
    file = made / "model.safetensors"
    weights, metadata = load_file(file), {"layout": checkpoint.LAYOUT, "quantization": "int8"}
    for change, words in (
        ({"layers.1.w2.scale": None}, r"lacks 1 of .*layers\.1\.w2\.scale"),
        ({"layers.1.w2.scale": torch.ones(3)}, r"layers\.1\.w2\.scale is \(3,\)"),
        ({"layers.1.w2.zero": torch.ones(3)}, "holds 'layers.1.w2.zero'"),
    ):
        save_file({key: value for key, value in (weights | change).items() if value is not None}, file, metadata=metadata)
        with pytest.raises(UserError, match=words):
            checkpoint.load_model(made, torch.float32)
    for mode, words in (("none", "layers.0.w13.scale"), ("int4-g32", "is "), ("int3", "known are none, int8")):
        save_file(weights, file, metadata=metadata | {"quantization": mode})
        with pytest.raises(UserError, match=words):
            checkpoint.load_model(made, torch.float32)
    save_file(
        {"embed.weight": weights.pop("embed.weight")}, made / "model-2.safetensors", metadata=metadata | {"quantization": "none"}
    )
    save_file(weights, file, metadata=metadata)
    with pytest.raises(UserError, match="is of quantization"):
        checkpoint.load_model(made, torch.float32)


class Killed(Exception):
    pass


def stream(folder, mode, stop_at=None, run="r", **changes):
    """Write the tiny model in small shards; ``stop_at``: the weight at whose reading the process dies. Returns what was read.
    ``changes``: other values of weights, None for one that isn't there."""
    read = []

    def reading(name, value):
        if len(read) == stop_at:
            raise Killed
        read.append(name)
        return value

    weights = {name: value.clone() for name, value in tiny("qwen2").state_dict().items()} | changes
    weights = {name: value for name, value in weights.items() if value is not None}
    steps = [Step(name, value.nbytes, lambda n=name, v=value: reading(n, v)) for name, value in weights.items()]
    stream_checkpoint(CheckpointWriter(folder, True, mode, run, 30_000), steps, hf_config("qwen2"), None)
    return read


def contents(folder):
    """Every file's bytes; of weight files the tensors' and the metadata, whose order in the file is the library's."""

    def of(path):
        if path.suffix != ".safetensors":
            return path.read_bytes()
        with checkpoint.open_shard(path) as shard:
            return shard.metadata(), {name: shard.get_tensor(name).view(torch.uint8).numpy().tobytes() for name in shard.keys()}

    return {path.name: of(path) for path in folder.iterdir()}


@pytest.mark.parametrize("mode", ["none", "int8"])
def test_a_stream_that_was_cut_goes_on_where_it_stopped(tmp_path, mode):
    every = stream(tmp_path / "whole", mode)
    wanted = contents(tmp_path / "whole")
    assert len(wanted) > 4
    for stop_at in range(1, len(every)):
        folder = tmp_path / str(stop_at)
        with pytest.raises(Killed):
            stream(folder, mode, stop_at)
        assert not (folder / "config.json").exists()
        done = sum(len(load_file(path)) for path in folder.glob("*.safetensors"))
        rest = stream(folder, mode)
        assert len(rest) < len(every) or not done
        assert contents(folder) == wanted
    with pytest.raises(Killed):
        stream(tmp_path / "other", mode, len(every) - 1)
    assert stream(tmp_path / "other", mode, run="another") == every


def test_a_shard_that_was_cut_short_is_written_anew(tmp_path):
    every = stream(tmp_path / "whole", "none")
    with pytest.raises(Killed):
        stream(tmp_path / "cut", "none", len(every) - 1)
    second = tmp_path / "cut" / "model-00002.safetensors"
    second.write_bytes(second.read_bytes()[:-100])  # the machine went down
    assert 0 < len(stream(tmp_path / "cut", "none")) < len(every)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


@pytest.mark.parametrize("changes, words", [
    ({"layers.1.w2.weight": None}, "lacks layers.1.w2.weight: 1 of 2. weights are missing"),
    ({"layers.1.w9.weight": torch.ones(3)}, "has layers.1.w9.weight too many"),
    ({"layers.0.w2.weight": torch.ones(3, 3)}, r"layers\.0\.w2\.weight is \(3, 3\), but config.json makes it \(48, 80\)"),
])  # fmt: skip
def test_a_source_that_is_not_whole_is_refused_before_it_is_written(tmp_path, changes, words):
    with pytest.raises(UserError, match=words):
        stream(tmp_path / "new", "none", **changes)
    assert not (tmp_path / "new" / "config.json").exists()


def test_a_full_disk_is_told_before_or_leaves_nothing_that_loads(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patched:
        patched.setattr(writer_module.shutil, "disk_usage", lambda folder: usage(10, 10, 1000))
        with pytest.raises(UserError, match=r"needs 0\.0 GB more"):
            stream(tmp_path / "a", "none")
    assert not list((tmp_path / "a").glob("*"))
    calls, real = [], writer_module.save_file

    def fills_up(tensors, path, **more):
        calls.append(path)
        if len(calls) == 3:
            path.write_bytes(b"half of it")
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        real(tensors, path, **more)

    with monkeypatch.context() as patched:
        patched.setattr(writer_module, "save_file", fills_up)
        with pytest.raises(UserError, match="can't be written.*No space left"):
            stream(tmp_path / "b", "int8")
    assert not list((tmp_path / "b").glob("*.partial"))
    with pytest.raises(UserError):
        checkpoint.load_model(tmp_path / "b", torch.float32)
    stream(tmp_path / "b", "int8")
    checkpoint.load_model(tmp_path / "b", torch.float32)


@pytest.mark.parametrize("mode", ["int8", "int4-g32"])
def test_compiled_blocks_compute_the_same_in_fewer_bits(mode):
    model = checkpoint.load_model(ROOT / "demo" / "draft", torch.bfloat16, quantization=mode)
    model.compile_blocks(dynamic=True)
    cache = model.new_cache(128)
    with torch.inference_mode():
        for rows in (1, 9):
            ids = torch.arange(rows) + 40
            plain, compiled = (model.step(ids, torch.arange(rows), cache, 128, compiled=c).float() for c in (False, True))
            assert (plain - compiled).abs().max() < 0.05 * plain.abs().max()


@pytest.mark.parametrize("asked", [None, "2"])
def test_a_model_that_fits_a_cache_is_one_threads_work(monkeypatch, asked):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    pair = checkpoint.find_pair(str(ROOT / "demo/target"))
    pair.load(torch.float32)
    assert chosen == ([] if asked else [1])
    monkeypatch.setattr(checkpoint, "FITS_A_CACHE", 1000)
    pair.load(torch.float32)
    assert len(chosen) == (0 if asked else 1)
