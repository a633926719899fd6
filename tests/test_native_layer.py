"""native.cpp's layer against Block.step, which says what a layer is; and what happens when somebody changes that."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ARCHITECTURES, ROOT, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import linear
import model
import native
from engine import Engine
from linear import Int8Linear, Linear
from model import Block

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
FLOAT, BFLOAT, S = torch.float32, torch.bfloat16, 160
NAMES = st.sampled_from(sorted(ARCHITECTURES))
FORMS = st.tuples(st.sampled_from([FLOAT, BFLOAT]), st.booleans())


def layer_of(name, dtype, int8, seed=0):
    """A layer of random weights, norms and biases, and its configuration."""
    whole = tiny(name, seed=seed)
    source = torch.Generator().manual_seed(seed)
    block = whole.layers[0]
    for key, weight in block.named_parameters():
        weight.data = weight.data + (0.2 * torch.randn(weight.shape, generator=source) if weight.ndim == 1 else 0)
    block = block.to(dtype)
    for key in ("wqkv", "wo", "w13", "w2") if int8 else ():
        layer = getattr(block, key)
        made = Int8Linear(layer.in_features, layer.out_features, layer.bias is not None)
        parts = Int8Linear.quantize(layer.weight.detach())
        made.load_state_dict({**parts, **({"bias": layer.bias.detach()} if layer.bias is not None else {})}, assign=True)
        setattr(block, key, made)
    return block.requires_grad_(False), whole.local


def inputs(config, dtype, T, start, seed=1):
    """x, cos, sin, mask, positions and two caches full of numbers."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn((T, config.dim), generator=source).to(dtype)
    positions = torch.arange(start, start + T)
    cos, sin = model.rope_table(config, positions)
    mask = torch.zeros((), dtype=dtype).masked_fill(torch.arange(S) > positions[:, None], float("-inf"))
    caches = torch.randn((2, config.n_kv_heads, S, config.head_dim), generator=source).to(dtype)
    return x, cos, sin, mask.repeat(config.n_heads // config.n_kv_heads, 1), positions, *caches


def fast(block, x, cos, sin, mask, positions, k, v):
    return block.native_step()(x, cos, sin, positions, k, v)


@settings(deadline=None, max_examples=60)
@given(NAMES, FORMS, st.integers(1, 24), st.integers(0, S - 24))
def test_it_gives_what_block_step_gives(name, form, T, start):
    block, config = layer_of(name, *form)
    ours, theirs = inputs(config, form[0], T, start), inputs(config, form[0], T, start)
    out, wanted = fast(block, *ours), block.step(*theirs)
    error = ((out - wanted).float().norm() / (wanted - theirs[0]).float().norm()).item()
    assert error < (2e-5 if form[0] == FLOAT else 0.03)
    for cache, right in zip(ours[-2:], theirs[-2:]):
        torch.testing.assert_close(cache, right, rtol=1e-5 if form[0] == FLOAT else 0.02, atol=1e-5 if form[0] == FLOAT else 0.02)


@settings(deadline=None, max_examples=30)
@given(NAMES, FORMS, st.integers(1, 64), st.integers(0, 90), st.integers(1, 3))
def test_a_tokens_result_does_not_depend_on_who_is_read_with_it(name, form, T, start, threads):
    block, config = layer_of(name, *form)
    x, cos, sin, _, positions, k, v = inputs(config, form[0], T, start)
    own, caches = block.native_step(), (k.clone(), v.clone())
    torch.set_num_threads(threads)
    try:
        together = own(x, cos, sin, positions, k, v)
    finally:
        torch.set_num_threads(1)
    parts = (part.split(1) for part in (x, cos, sin, positions))
    assert torch.equal(together, torch.cat([own(*one, *caches) for one in zip(*parts)]))
    assert torch.equal(k, caches[0]) and torch.equal(v, caches[1])


def test_a_small_layer_wakes_no_threads():
    code = f"""
import os, sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import torch, test_native_layer as own
block, config = own.layer_of("llama3", torch.float32, False)
torch.set_num_threads(3)
for T in (1, 64):
    before = len(os.listdir("/proc/self/task"))
    x, cos, sin, _, positions, k, v = own.inputs(config, torch.float32, T, 0)
    block.native_step()(x, cos, sin, positions, k, v)
    print(len(os.listdir("/proc/self/task")) - before)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["0", "2"]


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT])
@pytest.mark.parametrize("int8", [False, True])
def test_only_its_own_past_is_read(dtype, int8):
    block, config = layer_of("qwen2", dtype, int8)
    x, cos, sin, _, positions, k, v = inputs(config, dtype, 5, 20)
    wanted = block.native_step()(x, cos, sin, positions, k.clone(), v.clone())
    k[:, 25:], v[:, 25:] = float("nan"), float("inf")  # and what lay where it writes
    k[:, 20:25], v[:, 20:25] = float("nan"), float("nan")
    assert torch.equal(block.native_step()(x, cos, sin, positions, k, v), wanted)
    x[2] = float("nan")  # what is no number shows, from its token on
    out = block.native_step()(x, cos, sin, positions, k, v)
    assert out[:2].isfinite().all() and out[2:].isnan().all(1).all()


def test_what_does_not_fit_is_refused_and_nothing_is_touched():
    block, config = layer_of("llama3", FLOAT, False)
    x, cos, sin, _, positions, k, v = inputs(config, FLOAT, 4, 3)
    own, before = block.native_step(), k.clone()
    for bad in (positions - 4, positions + S):
        with pytest.raises(IndexError, match="don't lie in caches of 160"):
            own(x, cos, sin, bad, k, v)
    for bad in (
        (x.bfloat16(), cos, sin, positions, k, v), (x[:, 1:], cos, sin, positions, k, v), (x, cos[1:], sin, positions, k, v),
        (x, cos, sin.double(), positions, k, v), (x, cos, sin, positions.int(), k, v), (x, cos, sin, positions, k, v[:, 1:]),
        (x, cos, sin, positions, k.transpose(0, 1), v.transpose(0, 1)), (x, cos, sin, positions, k.bfloat16(), v.bfloat16()),
        (x.repeat(17, 1), cos.repeat(17, 1), sin.repeat(17, 1), positions.repeat(17), k, v),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="isn't what the layer reads"):
            own(*bad)
    assert torch.equal(k, before)


def step_of(whole):
    """Outputs of one pass of a model whose steps are in their fast form."""
    cache = whole.new_cache(32)
    return whole.step(torch.arange(4), torch.arange(4), cache, 32)


CHANGES = {
    "feed_forward": lambda self, x: self.whole(self.w2(F.gelu(self.w13(self.ffn_norm(x)).chunk(2, -1)[0]))),
    "project": lambda self, x, cos, sin: tuple(t * 1.01 for t in PROJECT(self, x, cos, sin)),
}
PROJECT = Block.project


@pytest.mark.parametrize("name", CHANGES)
def test_whoever_changes_the_block_gets_what_they_wrote(monkeypatch, capsys, name):
    whole = tiny().requires_grad_(False)
    whole.compile_blocks(dynamic=True)
    before, said = step_of(whole), capsys.readouterr().err
    assert not said
    monkeypatch.setattr(Block, name, CHANGES[name])
    monkeypatch.setattr(torch, "compile", lambda step, **options: step)
    model.tell_of_change.cache_clear()
    for _ in range(2):
        whole.compile_blocks(dynamic=True)
    said = capsys.readouterr().err
    assert said.count("doesn't do what Block.step does") == 1
    after = step_of(whole)
    whole.compiled_steps = whole.block_steps
    assert torch.equal(after, step_of(whole)) and not torch.allclose(after, before, atol=1e-4)


def test_a_programs_defaults_are_its_own_business(capsys):
    whole = tiny()
    torch.set_default_dtype(BFLOAT)
    try:
        with torch.device("meta"):
            whole.compile_blocks(dynamic=True)
    finally:
        torch.set_default_dtype(FLOAT)
    assert capsys.readouterr().err == "" and step_of(whole).isfinite().all()


def double(module, args, out):
    return out * 2


class Longer(Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def an_attribute(layer):
    feed_forward = layer.feed_forward
    layer.feed_forward = lambda x: 2 * feed_forward(x)


CHANGED = [
    lambda layer: setattr(layer.wo, "__class__", Longer), lambda layer: layer.wo.register_forward_hook(double),
    lambda layer: setattr(layer.q_norm, "forward", lambda x: 2 * x), lambda layer: setattr(layer.ffn_norm, "eps", 1.0),
    an_attribute,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGED)
def test_whoever_changes_one_layer_gets_what_they_wrote(monkeypatch, change):
    whole = tiny()
    before = step_of(whole)
    change(whole.layers[1])
    monkeypatch.setattr(torch, "compile", lambda step, **options: step)
    whole.compile_blocks(dynamic=True)
    assert [layer.native_step() is None for layer in whole.layers] == [False, True, False]
    after = step_of(whole)
    whole.compiled_steps = whole.block_steps
    torch.testing.assert_close(after, step_of(whole), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(after, before, rtol=0.01, atol=0.01)


REPLACED = [
    lambda whole: whole.load_state_dict({key: 2 * weight for key, weight in whole.state_dict().items()}, assign=True),
    lambda whole: [setattr(weight, "data", 2 * weight.data) for weight in whole.parameters()],
]


@pytest.mark.parametrize("replace", REPLACED)
def test_weights_that_are_replaced_are_used(replace):
    whole = tiny()
    whole.compile_blocks(dynamic=True)
    replace(whole)
    after = step_of(whole)
    whole.compiled_steps = whole.block_steps
    torch.testing.assert_close(after, step_of(whole), rtol=1e-4, atol=1e-2)


def test_blocks_of_rows_that_pytorch_multiplies_may_be_many_graphs(monkeypatch):
    whole = tiny(intermediate_size=1400)
    monkeypatch.setattr(torch, "compile", lambda step, **options: step)
    monkeypatch.setattr(linear, "_native", {(FLOAT, FLOAT, False): False})
    with torch._dynamo.config.patch(recompile_limit=8):
        whole.compile_blocks(dynamic=True)
        step_of(whole)
        assert torch._dynamo.config.recompile_limit == 64


def test_other_forms_are_compiled(monkeypatch):
    whole = tiny().requires_grad_(False)
    monkeypatch.setattr(native, "library", lambda: None)
    assert whole.layers[0].native_step() is None
    monkeypatch.undo()
    assert whole.layers[0].native_step() is not None
    whole.layers[0].attn_norm.bfloat16()
    assert whole.layers[0].native_step() is None


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3"])
def test_in_bfloat16_too_drafting_changes_no_token(name):
    target, draft = (tiny(name, seed=seed).bfloat16().requires_grad_(False) for seed in (0, 1))
    texts = []
    for engine in (
        Engine(target, max_len=120, compile=True), Engine(target, draft, draft_len=7, max_len=120, compile=True),
        Engine(target, target, draft_len=5, max_len=120, compile=True),
    ):  # fmt: skip
        engine.prefill([3, 1, 4, 1, 5])
        tokens = [token for now in itertools.islice(engine.rounds(5), 100) for token in now.tokens]
        texts.append(tokens[:100])
    assert texts[0] == texts[1] == texts[2]
