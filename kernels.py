"""What few rows need on CUDA, in Triton: the product with an int8 weight, and attention over the cache; imported only where used.

At batch 1 a pass costs the bytes it reads, and the plain expression, which widens the weight to 16 bits in memory first, reads
and writes five bytes for each of the weight's. ``int8_rows`` reads the weight once, widens it in registers and multiplies on the
tensor cores: the weight's rows are the product's rows, so that one row of x, filled up to sixteen columns, is no waste of what
is scarce. Where the weight is too small to keep every multiprocessor busy its inputs are divided (split-K): each part's sums go
to memory that stays in the second-level cache, and the program that comes last adds them up in their order, so that a result
never depends on who was first. ``few_queries`` divides attention's keys in the same way; how it is cut up is ``attention.py``'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

P = TypeVar("P")
MOST_ROWS = 64  # of x: more are cheaper by the plain expression


@triton.jit
def int8_rows(
    x, weight, scale, bias, out, sums, arrived, T, N, K, share,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """out [T, N] = x [T, K] · weight [N, K]ᵀ · scale [N] + bias [N], for BLOCK_N outputs and ``share`` inputs of them."""
    block, part = tl.program_id(0), tl.program_id(1)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.arange(0, BLOCK_T)
    rows = weight + n.to(tl.int64)[:, None] * K
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for start in range(part * share, tl.minimum((part + 1) * share, K), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = tl.load(rows + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0, eviction_policy="evict_first")
        columns = tl.load(x + t[None, :] * K + k[:, None], mask=(t < T)[None, :] & (k < K)[:, None], other=0.0)
        total = tl.dot(w.to(columns.dtype), columns, total)
    place = t[None, :] * N + n[:, None]
    inside = (n < N)[:, None] & (t < T)[None, :]
    last = True
    if SPLIT > 1:
        tl.store(sums + part * T * N + place, total, mask=inside)
        tl.debug_barrier()  # all of the program's sums are written before it says so
        last = tl.atomic_add(arrived + block, 1, sem="acq_rel") == SPLIT - 1
        if last:
            total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
            for other in range(SPLIT):
                total += tl.load(sums + other * T * N + place, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(arrived + block, 0)  # ready for the next product
    if last:
        total *= tl.load(scale + n, mask=n < N, other=0.0)[:, None]
        if HAS_BIAS:
            total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


UNSEEN = tl.constexpr(-1e30)  # the largest score of a row that has seen no key yet: finite, so that differences of two are numbers


@triton.jit
def few_queries(
    q, k, v, positions, out, sums, arrived, T, k_head, v_head, share, scale, G: tl.constexpr, C: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """out [T, K, G, C] = attention of q [T, K, G, C] over k, v [K, S, C], for BLOCK_R of a head's T * G rows and ``share`` keys.

    ``scale`` is that of scores in powers of two; PARTS is SPLIT, filled up to a power of two.
    """
    head, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads, R = tl.num_programs(0), T * G
    row, c = block * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, C)
    own = (row < R)[:, None]
    sees = tl.load(positions + row // G, mask=row < R, other=0).to(tl.int32)  # the last key that a row sees
    last = tl.max(sees, 0)
    used = last // share + 1  # parts that hold a key which one of the rows sees
    if part >= used:
        return
    place = ((row // G * heads + head) * G + row % G)[:, None] * C + c[None, :]
    queries = tl.load(q + place, mask=own, other=0.0)
    top, total = tl.full((BLOCK_R,), UNSEEN, tl.float32), tl.zeros((BLOCK_R,), tl.float32)
    values = tl.zeros((BLOCK_R, C), tl.float32)
    for start in range(part * share, tl.minimum((part + 1) * share, last + 1), BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        keys = tl.load(k + head.to(tl.int64) * k_head + s[None, :] * C + c[:, None], mask=(s <= last)[None, :], other=0.0)
        scores = tl.where(s[None, :] <= sees[:, None], tl.dot(queries, keys) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights, keep = tl.exp2(scores - higher[:, None]), tl.exp2(top - higher)
        top, total = higher, total * keep + tl.sum(weights, 1)
        found = tl.load(v + head.to(tl.int64) * v_head + s[:, None] * C + c[None, :], mask=(s <= last)[:, None], other=0.0)
        values = tl.dot(weights.to(found.dtype), found, values * keep[:, None])
    if used == 1:
        tl.store(out + place, (values / total[:, None]).to(out.dtype.element_ty), mask=own)
        return
    tops = sums + SPLIT * heads * R * C  # behind the values: each row's largest score, and behind those its sum of weights
    totals = tops + SPLIT * heads * R
    mine = (part * heads + head) * R + row
    tl.store(sums + mine[:, None] * C + c[None, :], values, mask=own)
    tl.store(tops + mine, top, mask=row < R)
    tl.store(totals + mine, total, mask=row < R)
    tl.debug_barrier()  # all that the program found is written before it says so
    counter = arrived + block * heads + head
    if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
        tl.store(counter, 0)  # ready for the next kernel
        parts = tl.arange(0, PARTS)
        for first in range(0, tl.minimum(BLOCK_R, R - block * BLOCK_R), AT_ONCE):
            r = block * BLOCK_R + first + tl.arange(0, AT_ONCE)
            of = (parts[:, None] * heads + head) * R + r[None, :]
            there = (parts < used)[:, None] & (r < R)[None, :]
            highest = tl.load(tops + of, mask=there, other=UNSEEN, cache_modifier=".cg")
            sum_of = tl.load(totals + of, mask=there, other=1.0, cache_modifier=".cg")
            of_part = tl.load(sums + of[:, :, None] * C + c, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
            share_of = tl.exp2(highest - tl.max(highest, 0)[None, :])
            mean = tl.sum(of_part * share_of[:, :, None], 0) / tl.sum(sum_of * share_of, 0)[:, None]
            tl.store(
                out + ((r // G * heads + head) * G + r % G)[:, None] * C + c[None, :],
                mean.to(out.dtype.element_ty), mask=(r < R)[:, None],
            )  # fmt: skip


class Plan(NamedTuple):
    """How a product is cut up: a program's outputs and inputs at a time, the parts its inputs are divided into, and Triton's
    warps and stages."""

    block_n: int
    block_k: int
    split: int
    warps: int
    stages: int


def plan_for(N: int, K: int, processors: int, block_n: int = 64, block_k: int = 128) -> Plan:
    """A plan that keeps ``processors`` multiprocessors busy: as few parts as make two programs for each of them."""
    blocks, steps = triton.cdiv(N, block_n), triton.cdiv(K, block_k)
    wanted = max(1, triton.cdiv(2 * processors, blocks))
    split = min(wanted, max(1, steps // 2), 16)  # a part of fewer than two steps would spend its time on sums
    share = triton.cdiv(steps, split)
    return Plan(block_n, block_k, triton.cdiv(steps, share), 4, 4)


def block_t(T: int) -> int:
    """Columns that a product of T rows is filled up to: the tensor cores take sixteen at least."""
    return max(16, triton.next_power_of_2(T))


def bytes_moved(T: int, N: int, K: int, plan: Plan) -> tuple[int, int]:
    """(least, planned) bytes between memory and the processors: x, weight, steps and out once; and as the plan moves them.

    What every program reads of x, and the sums of the parts, are counted in full, though they mostly stay in the second-level
    cache.
    """
    least = N * K + 2 * T * K + 4 * N + 2 * T * N
    again = 2 * T * K * (triton.cdiv(N, plan.block_n) - 1) + (8 * T * N * plan.split if plan.split > 1 else 0)
    return least, least + again


_scratch: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}


def scratch(device: torch.device, sums: int, blocks: int) -> tuple[Tensor, Tensor]:
    """Buffers for the parts' sums and for who has arrived, shared by a device's products, which run one after another.

    Smaller ones, that were outgrown, are kept: a captured graph may write to them.
    """
    have = _scratch.setdefault(device, [])
    if not have or have[-1][0].numel() < sums or have[-1][1].numel() < blocks:
        if have:
            sums, blocks = max(sums, have[-1][0].numel()), max(blocks, have[-1][1].numel())
        have.append((torch.empty(sums, device=device), torch.zeros(blocks, dtype=torch.int32, device=device)))
    return have[-1]


def int8_product(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, plan: Plan) -> Tensor:
    """x [T, K] of 16 bits times an int8 weight [N, K] times its steps [N], plus bias [N]; T at most MOST_ROWS. In x's dtype."""
    (T, K), N = x.shape, weight.shape[0]
    out = torch.empty((T, N), dtype=x.dtype, device=x.device)
    blocks = triton.cdiv(N, plan.block_n)
    share = triton.cdiv(triton.cdiv(K, plan.block_k), plan.split) * plan.block_k
    sums, arrived = scratch(x.device, T * N * plan.split if plan.split > 1 else 1, blocks)
    int8_rows[(blocks, plan.split)](
        x.contiguous(), weight, scale, scale if bias is None else bias, out, sums, arrived, T, N, K, share,
        BLOCK_T=block_t(T), BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, SPLIT=plan.split, HAS_BIAS=bias is not None,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return out


def plain(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """The product by PyTorch's own means: the kernel's reference, and what takes its place where it is the slower one."""
    wide = weight.to(x.dtype)
    if x.dtype == torch.float16:  # sums of up to 127 times x would leave its range
        return F.linear(x, wide * scale[:, None].to(x.dtype), bias)
    out = F.linear(x, wide) * scale
    return (out if bias is None else out + bias).to(x.dtype)


def plans_for(N: int, K: int, processors: int) -> list[Plan]:
    """The plans worth measuring for a product."""
    return [plan_for(N, K, processors, block_n, block_k) for block_n, block_k in ((64, 128), (32, 128), (64, 256), (128, 128))]


def seconds(run: Callable[[], Tensor]) -> float:
    """Median of seven runs on the current device, its second-level cache emptied before each, as other layers would."""
    flush = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(9):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times[2:])[3]  # the first ones compile


def processors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


_chosen: dict[tuple[Any, ...], Any] = {}


def fastest(shape: tuple[Any, ...], plans: Callable[[], list[P]], run: Callable[[P | None], Tensor]) -> P | None:
    """The plan that ``run`` is fastest by, or None where that is PyTorch's own way; measured when a shape is first met."""

    def cost(way: P | None) -> float:
        try:
            return seconds(lambda: run(way))
        except OutOfResources:  # a plan for larger devices
            return math.inf

    if shape not in _chosen:
        _chosen[shape] = min([None, *plans()], key=cost)
    return _chosen[shape]


def int8_linear_cuda(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """The product by what is fastest for its shape, which is measured when a shape is first met: while an engine warms up."""
    (T, K), N = x.shape, weight.shape[0]
    if T > MOST_ROWS or x.dtype == torch.float32:
        return plain(x, weight, scale, bias)

    def plans() -> list[Plan]:
        return plans_for(N, K, processors_of(x.device))

    way = fastest(("int8", x.device, x.dtype, block_t(T), N, K), plans, lambda way: by(way, x, weight, scale, bias))
    return by(way, x, weight, scale, bias)


def by(way: Plan | None, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """The product by a plan, or by the plain expression."""
    return plain(x, weight, scale, bias) if way is None else int8_product(x, weight, scale, bias, way)
