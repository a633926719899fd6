"""Attention of a few tokens over the static KV cache: PyTorch's with a mask, or on CUDA a Triton kernel that divides the keys.

PyTorch's attention under a mask gives each key head, and each 64 queries of it, to one program, which walks the whole bucket of
the cache while most of a GPU looks on. The kernel (``kernels.few_queries``) gives each a part of the keys (split-KV), reads no key
that nobody may see, and lets the program that comes last combine the parts.

Shapes, as in ``model``: T tokens, K key/value heads, G query heads to each, C = head_dim, S = positions of the cache that are read.
A key head's rows are its G * T queries, token by token.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_TOKENS = 64  # more are PyTorch's business
HEAD_DIMS = (16, 32, 64, 128)
MOST_PARTS = 32


class Plan(NamedTuple):
    """How attention is cut up: a program's rows, its keys at a time, the parts the keys are divided into, and Triton's warps and
    stages."""

    block_r: int
    block_s: int
    split: int
    warps: int = 4
    stages: int = 3  # keys and values of two steps are under way at once

    def share(self, S: int) -> int:
        """Keys of a part, of S."""
        return -(-S // (self.block_s * self.split)) * self.block_s


def plan_for(heads: int, rows: int, S: int, processors: int, block_r: int = 0, block_s: int = 64) -> Plan:
    """A plan for ``processors`` multiprocessors: about two programs for each of them, and no more parts than pay.

    A part reads 4 C S / parts bytes of keys and values in 16 bits, and who combines them 4 C parts * rows of sums in fp32: together
    that is least where the parts are the root of S / rows.

    Args:
        block_r: 0: sixteen, the least that the tensor cores take, or thirty-two for more rows than that.
    """
    block_r = block_r or (16 if rows <= 16 else 32)
    programs = heads * -(-rows // block_r)
    wanted = min(-(-2 * processors // programs), math.isqrt(S // min(rows, block_r)), MOST_PARTS)
    share = Plan(block_r, block_s, max(1, wanted)).share(S)
    return Plan(block_r, block_s, -(-S // share))


def plans_for(heads: int, rows: int, S: int, processors: int) -> list[Plan]:
    """The plans worth measuring."""
    tiles = ((16, 64), (16, 32), (16, 128)) if rows <= 16 else ((32, 64), (64, 64), (16, 64))
    return [plan_for(heads, rows, S, processors, *tile) for tile in tiles]


def constants(G: int, C: int, plan: Plan) -> dict[str, int]:
    """What the kernel is compiled for. Parts are combined as many rows at once as fit into half of the registers."""
    parts, block_r = 1 << (plan.split - 1).bit_length(), plan.block_r
    at_once = min(block_r, max(1, 8192 // (parts * C)))
    return {"G": G, "C": C, "BLOCK_R": block_r, "BLOCK_S": plan.block_s, "SPLIT": plan.split, "PARTS": parts, "AT_ONCE": at_once}


def bytes_moved(T: int, K: int, G: int, C: int, S: int, plan: Plan) -> tuple[int, int]:
    """(least, planned) bytes between memory and the processors over S visible keys: all once; and as the plan moves them.

    Keys and values that several blocks of rows read, and the parts' sums, are counted in full, though they mostly stay in the
    second-level cache.
    """
    cache, rows, blocks = 4 * K * S * C, T * G, -(-T * G // plan.block_r)
    least = cache + 4 * K * rows * C
    exchanged = 8 * plan.split * K * rows * (C + 2) if plan.split > 1 else 0
    return least, least + (blocks - 1) * cache + exchanged


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """``attend`` by PyTorch's own means: the kernel's reference, and what takes its place where it is the slower one.

    The G queries that share a key head are read as G * T rows, so that keys and values are read once and never repeated.
    """
    T, K = len(q), len(k)
    rows = q.unflatten(1, (K, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # [K, G * T, C]
    attended = F.scaled_dot_product_attention(rows[None], k[None], v[None], attn_mask=mask)[0]
    return attended.unflatten(1, (-1, T)).permute(2, 0, 1, 3).flatten(1)


def divided(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, plan: Plan) -> Tensor:
    """``attend`` by the kernel, in 16 bits. Keys and values that no token sees may be anything: they are not read."""
    import kernels  # needs Triton, which comes with PyTorch for CUDA

    (T, H, C), (K, S, _) = q.shape, k.shape
    assert k.stride()[1:] == v.stride()[1:] == (C, 1), "the cache's rows lie one behind the other"
    out = torch.empty((T, H * C), dtype=q.dtype, device=q.device)
    blocks = -(-T * H // (K * plan.block_r))
    sums, arrived = kernels.scratch(q.device, plan.split * T * H * (C + 2) if plan.split > 1 else 1, K * blocks)
    kernels.few_queries[(K, blocks, plan.split)](
        q.contiguous(), k, v, positions, out, sums, arrived, T, k.stride(0), v.stride(0), plan.share(S), math.log2(math.e) / C**0.5,
        **constants(H // K, C, plan), num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return out


def by(way: Plan | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    """``attend`` by a plan of the kernel's, or by PyTorch's own means."""
    return masked(q, k, v, mask) if way is None else divided(q, k, v, positions, way)


def _on_cuda(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    """Attention by what is fastest for its shape, which is measured when a shape is first met: while an engine warms up."""
    import kernels

    (T, H, C), (K, S, _) = q.shape, k.shape
    rows, bucket = T * H // K, 1 << (S - 1).bit_length()

    def plans() -> list[Plan]:
        return plans_for(K, rows, bucket, kernels.processors_of(q.device))

    @functools.cache
    def late() -> Tensor:  # positions as late as can be: an engine warms up on an empty text, which no bucket is for
        return torch.arange(S - T, S, device=q.device).clamp(min=0)

    shape = "attention", q.device, q.dtype, K, H, C, kernels.block_t(rows), bucket
    return by(kernels.fastest(shape, plans, lambda way: by(way, q, k, v, mask, late())), q, k, v, mask, positions)


# an operation of its own, as in ``linear``. Its tag lets compiled code hand over the caches as they lie: without one it would copy
# them, because they are slices
_library = torch.library.Library("engine", "FRAGMENT")
_library.define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor mask, Tensor positions) -> Tensor", tags=(torch.Tag.needs_fixed_stride_order,)
)
_library.impl("attend", _on_cuda, "CUDA")


@torch.library.register_fake("engine::attend", lib=_library)
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    """Attention of T tokens over the cache, in which their own keys and values lie already.

    Args:
        q: [T, K * G, C].
        k, v: [K, S, C].
        mask: [G * T, S], -inf where a key lies behind its token's position, else 0.
        positions: [T], which say the same.

    Returns:
        [T, K * G * C].
    """
    if q.device.type == "cuda" and q.element_size() == 2 and q.shape[0] <= MOST_TOKENS and q.shape[2] in HEAD_DIMS:
        return torch.ops.engine.attend(q, k, v, mask, positions)
    return masked(q, k, v, mask)
