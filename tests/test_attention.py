"""The attention kernel, run by Triton's interpreter on the CPU, against exact attention; and when it is the one that is used."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, tiny
from hypothesis import given
from hypothesis import strategies as st
from shapes import shape
from torch._subclasses import FakeTensorMode

import attention
import model
from attention import Plan
from tp import local_config

kernels = pytest.importorskip("kernels")

# key heads of a rank, and query heads to each: the Llamas' on 1, 2 and 8 ranks, and Qwen2.5's
LLAMAS = [(name, size) for name in ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b") for size in (1, 2, 8)]
LOCAL = [local_config(shape(name), size) for name, size in [*LLAMAS, ("qwen2.5-1.5b", 1)]]
HEADS = sorted((c.n_kv_heads, c.n_heads // c.n_kv_heads) for c in LOCAL)


def operands(K, G, T, S, C, first, dtype=torch.float16):
    """q, k, v, mask and positions of T tokens from ``first`` on; the caches are slices of larger ones, NaN behind the tokens."""
    generator = torch.Generator().manual_seed(1000 * T + S + first)
    q = torch.randn(T, K * G, C, generator=generator).to(dtype)
    k, v = torch.randn(2, K, S + 8, C, generator=generator).to(dtype)[:, :, :S]
    positions = torch.arange(first, first + T)
    mask = torch.zeros(T, S, dtype=dtype).masked_fill(torch.arange(S) > positions[:, None], -math.inf).repeat(G, 1)
    for cache in (k, v):
        cache[:, first + T :] = math.nan
    return q, k, v, mask, positions


def exact(q, k, v, mask, positions):
    """Head by head, over the keys that may be seen, in fp64."""
    (_, H, C), K = q.shape, len(k)
    k, v = (cache[:, : positions.max() + 1].double().repeat_interleave(H // K, 0) for cache in (k, v))
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) / C**0.5  # [H, T, S]
    hidden = torch.arange(k.shape[1]) > positions[:, None]
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).transpose(0, 1).flatten(1)


def is_near(out, args):
    """Whether it is right to the last places of its dtype, at the size of what is added up."""
    wanted, step = exact(*args), torch.finfo(out.dtype).eps
    return bool(((out.double() - wanted).abs() <= step * wanted.abs() + 4 * step * wanted.std()).all())


def by_kernel(args, plan):
    q, k, v, _, positions = args
    return attention.divided(q, k, v, positions, plan)


# tokens, bucket, first position, rows and keys of a program, parts: at the start, in the middle and at the end of the bucket; parts
# that divide it evenly or not, of which all, some or one are in use
CUTS = [
    (1, 128, 0, 16, 64, 2), (1, 256, 100, 16, 64, 3), (2, 256, 254, 16, 32, 4), (1, 1024, 1023, 16, 128, 5),
    (2, 1024, 511, 16, 128, 8), (9, 128, 60, 64, 32, 4), (9, 512, 300, 64, 64, 3), (1, 512, 192, 16, 64, 4),
]  # fmt: skip


@pytest.mark.parametrize("K, G", HEADS)
def test_it_is_attention(K, G):
    at = HEADS.index((K, G))
    for T, S, first, *cut in (CUTS[(at + i) % len(CUTS)] for i in ((0, 3) if K < 8 else (0,))):  # the interpreter is slow
        args = operands(K, G, T, S, 128, first)
        out = by_kernel(args, Plan(*cut))
        assert out.dtype == torch.float16 and is_near(out, args), (T, S, first, cut)


@pytest.mark.parametrize("K, G, C, T, S, first, cut", [
    (1, 16, 128, 26, 128, 90, (64, 64, 2)), (2, 6, 128, 26, 256, 230, (32, 128, 2)), (1, 4, 128, 64, 512, 400, (64, 128, 4)),
    (1, 16, 64, 64, 128, 64, (64, 64, 2)), (4, 4, 16, 26, 256, 3, (64, 64, 4)), (1, 5, 32, 3, 300, 290, (16, 32, 7)),
])  # fmt: skip
def test_blocks_of_tokens_and_odd_sizes(K, G, C, T, S, first, cut):
    args = operands(K, G, T, S, C, first)
    assert is_near(by_kernel(args, Plan(*cut)), args)


def test_each_token_sees_up_to_its_own_position():
    """Whatever the positions are: one key each must change what it should, and nothing else."""
    args = operands(1, 4, 3, 128, 16, 0)
    q, k, v, _, _ = args
    k, v = k.nan_to_num(1.0), v.nan_to_num(1.0)
    positions, plan = torch.tensor([70, 0, 31]), Plan(16, 32, 3)
    before = attention.divided(q, k, v, positions, plan)
    assert is_near(before, (q, k, v, None, positions))
    for key, seen_by in ((71, []), (70, [0]), (32, [0]), (31, [0, 2]), (1, [0, 2]), (0, [0, 1, 2])):
        changed = v.clone()
        changed[:, key] += 100
        now = attention.divided(q, k, changed, positions, plan)
        assert [t for t in range(3) if not torch.equal(now[t], before[t])] == seen_by


def test_parts_are_combined_in_their_order_and_leave_nothing_behind(monkeypatch):
    monkeypatch.setattr(kernels, "_scratch", {})
    args, plan = operands(2, 4, 2, 128, 16, 100), Plan(16, 32, 4)
    first = by_kernel(args, plan)
    assert torch.equal(first, by_kernel(args, plan))
    ((sums, arrived),) = kernels._scratch[args[0].device]
    assert not arrived.any() and len(arrived) == 2
    sums.fill_(float("nan"))  # what an earlier kernel left must not matter
    assert torch.equal(first, by_kernel(args, plan))
    by_kernel(operands(4, 4, 2, 128, 16, 100), plan)  # needs more room, and a graph may go on writing to the old one
    assert torch.equal(first, by_kernel(args, plan)) and len(kernels._scratch[args[0].device]) == 2


def test_scores_of_any_size_are_weighed():
    """The largest scores in the first part, in the last, or all far below zero: sums are brought to a common size."""
    q, k, v, mask, positions = operands(1, 4, 1, 128, 16, 127)
    q[:] = 4.0
    for where, size in ((slice(0, 32), 12.0), (slice(96, 128), 12.0), (slice(0, 128), -12.0)):
        keys = k / 8
        keys[:, where] += size
        args = q, keys, v, mask, positions
        assert is_near(by_kernel(args, Plan(16, 32, 4)), args)


def test_what_is_no_number_stays_so():
    q, k, v, mask, positions = operands(1, 4, 2, 128, 16, 60)
    q[1, 2] = math.nan
    out = by_kernel((q, k, v, mask, positions), Plan(16, 32, 2)).unflatten(1, (4, 16)).isnan().all(-1)
    assert out.nonzero().tolist() == [[1, 2]]


@given(st.sampled_from(HEADS), st.integers(1, 64), st.integers(1, 20_000), st.sampled_from([4, 108, 132, 148]))
def test_plans_leave_no_key_out_and_no_part_empty(heads, T, S, processors):
    K, G = heads
    for plan in attention.plans_for(K, G * T, S, processors):
        share, programs = plan.share(S), K * -(-G * T // plan.block_r)
        assert share % plan.block_s == 0 and share * (plan.split - 1) < S <= share * plan.split
        assert plan.split == 1 or programs * plan.split < 2 * processors + programs
        assert plan.split <= attention.MOST_PARTS and plan.split**2 * min(G * T, plan.block_r) <= max(S, 64)


def test_the_fastest_way_is_taken_and_measured_once(monkeypatch):
    args, asked, late = operands(2, 4, 3, 128, 16, 5), [], []
    args = (*(x.nan_to_num(0.0) for x in args[:3]), *args[3:])

    def fake(run):
        asked.append(run().shape)
        return times.get(len(asked), 1.0)

    def divided(q, k, v, positions, plan):
        late.append(positions.tolist())
        return right(q, k, v, positions, plan)

    times, right = {3: 0.5}, attention.divided
    monkeypatch.setattr(kernels, "seconds", fake)
    monkeypatch.setattr(kernels, "_chosen", {})
    monkeypatch.setattr(attention, "divided", divided)
    monkeypatch.setattr(kernels, "processors_of", lambda device: 4)
    assert is_near(attention._on_cuda(*args), args)
    assert list(kernels._chosen.values()) == [attention.plans_for(2, 12, 128, 4)[1]] and asked == [(3, 128)] * 4
    assert late == [[125, 126, 127]] * 3 + [[5, 6, 7]]  # measured where a bucket costs most
    with monkeypatch.context() as patched:
        patched.setattr(torch, "arange", None)  # a captured graph holds nothing but attention
        attention._on_cuda(*args)
    assert len(asked) == 4
    times[5] = 0.1
    wide = operands(2, 4, 20, 128, 16, 5)
    wide = (*(x.nan_to_num(0.0) for x in wide[:3]), *wide[3:])
    assert is_near(attention._on_cuda(*wide), wide) and list(kernels._chosen.values())[1] is None  # PyTorch's may win too


def test_where_the_kernel_may_be_used(monkeypatch):
    """Only on CUDA, in 16 bits, for few tokens and heads that it knows. Elsewhere it is PyTorch's operations as they are."""
    monkeypatch.setattr(attention, "masked", lambda q, k, v, mask: None)

    def used(device, dtype=torch.bfloat16, T=2, C=128):
        with FakeTensorMode():
            q, cache = torch.empty(T, 8, C, dtype=dtype, device=device), torch.empty(2, 2, 128, C, dtype=dtype, device=device)
            mask, positions = torch.empty(4 * T, 128, dtype=dtype, device=device), torch.arange(T, device=device)
            out = attention.attend(q, *cache, mask, positions)
            return out is not None and (out.shape, out.dtype) == ((T, 8 * C), dtype)

    assert used("cuda") and used("cuda", torch.float16, T=64, C=64)
    assert not (used("cuda", torch.float32) or used("cuda", T=65) or used("cuda", C=96) or used("cpu") or used("meta"))


def test_compiled_code_does_not_copy_the_caches(monkeypatch):
    """They are slices, which an operation without the tag would get as copies, a bucket of them for every layer."""
    seen = []

    def on_cpu(q, k, v, mask, positions):
        seen.append((k.data_ptr(), v.data_ptr(), k.stride()))
        return attention.masked(q, k, v, mask)

    def step(q, new, k, v, mask, positions):
        k.index_copy_(1, positions, new)
        v.index_copy_(1, positions, 2 * new)
        return torch.ops.engine.attend(q.float().half(), k, v, mask, positions)

    library = torch.library.Library("engine", "IMPL")
    library.impl("attend", on_cpu, "CPU")
    try:
        q, k, v, mask, positions = operands(2, 4, 1, 128, 16, 127)
        with torch.inference_mode():
            torch.compile(step)(q, torch.ones(2, 1, 16).half(), k, v, mask, positions)
    finally:
        library._destroy()
    assert seen == [(k.data_ptr(), v.data_ptr(), k.stride())] and not k.is_contiguous() and k[0, 127, 0] == 1 and v[0, 127, 0] == 2


def test_a_model_decodes_by_it(monkeypatch):
    net = tiny("llama3.2").half()
    tokens = torch.randint(0, 131, (40,), generator=torch.Generator().manual_seed(3))

    def states():
        cache = net.new_cache(128)
        lengths = torch.tensor([20, 1, 2, 17]).cumsum(0).tolist()
        return torch.cat([net.step(tokens[a:b], torch.arange(a, b), cache, 128) for a, b in zip([0, *lengths], lengths)])

    wanted = states().float()
    monkeypatch.setattr(model, "attend", lambda q, k, v, mask, positions: attention.divided(q, k, v, positions, Plan(16, 32, 3)))
    torch.testing.assert_close(states().float(), wanted, atol=0.01 * wanted.std().item(), rtol=0.01)


def test_it_compiles_for_an_h100():
    """What the interpreter takes the compiler may refuse: types that change in a loop, say."""
    script = (
        "import sys, json; sys.path[:0] = sys.argv[1:]\n"
        "from kernel_report import attention_rows\n"
        "print(json.dumps([row for T in (1, 26) for row in attention_rows('llama-3.1-405b', 8, T, 1024)]))"
    )
    command = [sys.executable, "-c", script, str(ROOT), str(ROOT / "scripts")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0"})
    assert done.returncode == 0, done.stderr
    for row in json.loads(done.stdout.splitlines()[-1]):
        assert row["spilled"] == 0 and row["mma"] + row["wgmma"] and row["shared"] < 227 * 1024 and row["parts"] > 1
