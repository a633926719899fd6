"""Products of a few rows with a weight matrix, whatever form its numbers are kept in: floating point, int8, int4.

Every form is a module with ``forward(x)``, x [..., D_in] to [..., D_out] in x's dtype, and with ``with_judge``, which appends
a judge's row. The quantized ones are made from a floating-point weight by their ``quantize`` and give it back, as it is used,
by ``dequantize``: that is their reference.

int8  one symmetric step for each output channel, in fp32: w = q · s, |q| <= 127
int4  groups of 32 or 128 inputs with a step and a zero of their own, in bfloat16: w = (q - 8) · s + z, two q in a byte
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import native
from tp import told

JUDGE_ROWS = 8  # rows added to the output projection for the one judge row: eight keep the product aligned
MODES = ("int8", "int4-g32", "int4-g128")
QUANTIZED = ("wqkv", "wo", "w13", "w2", "output")  # the layers that are quantized; embeddings, norms and biases never are
Product = Callable[..., Tensor]
SMALL = 1 << 18  # bytes of a weight: below, calling a product costs as much as the product
FEW = 3  # rows for which products are bound by reading the weight
BFLOAT16_PRODUCTS = bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, D_in] times weight [D_out, D_in] of 8 or 16 bits, on a CPU: widened to fp32 a cacheful at a time. Returns fp32.

    On a CPU without 16-bit arithmetic PyTorch's own product costs nearly T times that of one row; this one widens each weight
    once for all rows (26 rows of an 8960 x 1536 bfloat16 weight on one core: 27 ms against 79 ms).
    """
    rows = max(16, 300_000 // weight.shape[1])  # about 1 MB of fp32
    wide = torch.empty((rows, weight.shape[1]), dtype=torch.float32)
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32)
    x = x.float()
    for start in range(0, weight.shape[0], rows):
        part = wide[: min(rows, weight.shape[0] - start)].copy_(weight[start : start + rows])
        out[:, start : start + rows] = x @ part.t()
    return out


def torch_linear(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """The product on a CPU by PyTorch's own means. In x's dtype."""
    if weight.dtype == x.dtype and (x.dtype == torch.float32 or BFLOAT16_PRODUCTS or len(x) <= 2):
        return F.linear(x, weight, bias)
    # the kernel reads beyond the ends of rows that aren't whole vectors (PyTorch 2.13)
    if weight.dtype == torch.int8 and x.dtype == torch.bfloat16 and len(x) <= 8 and weight.shape[1] % 64 == 0:
        ones = torch.ones(weight.shape[0], dtype=x.dtype)  # the kernel takes steps in x's dtype only, which would round ours
        out = torch._weight_int8pack_mm(x, weight, ones)
    else:
        out = wide_linear(x, weight)
    if scale is not None:
        out = out * scale
    return (out if bias is None else out + bias).to(x.dtype)


_native: dict[tuple[torch.dtype, torch.dtype, bool], bool] = {}  # whether our loops are used; until ``choose``, they are


def ours(x_dtype: torch.dtype, w_dtype: torch.dtype, T: int) -> bool:
    """Whether T rows on a CPU are multiplied by our own loops."""
    return _native.get((x_dtype, w_dtype, T <= FEW), True)


def _on_cpu(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """The product by our own loops or by PyTorch's."""
    # PyTorch multiplies many rows as fast as we do, but must widen an int8 weight first
    parts = x.split(native.MOST_ROWS) if weight.dtype == torch.int8 and len(x) > native.MOST_ROWS else (x,)
    if not ours(x.dtype, weight.dtype, len(x)) or weight.nbytes < SMALL or not native.can(parts[0], weight, scale, bias):
        return torch_linear(x, weight, scale, bias)
    done = [native.few_rows(part, weight, scale, bias) for part in parts]
    return done[0] if len(done) == 1 else torch.cat(done)


def choose(x_dtype: torch.dtype, quantization: str) -> None:
    """Measure which products suit this CPU, for one row and for a block, where that isn't known yet: while a model is loaded.

    Rank 0 measures for all. Ours are taken unless PyTorch's are a third faster: a text should not depend on a coin's toss.
    """
    w_dtype = x_dtype if quantization == "none" else torch.int8
    if (x_dtype, w_dtype, True) in _native:
        return
    weight = torch.ones((2048, 2048), dtype=w_dtype)
    scale = torch.ones(2048) if w_dtype == torch.int8 else None
    for T in (1, 16):
        args = torch.ones((T, 2048), dtype=x_dtype), weight, scale
        _native[x_dtype, w_dtype, T <= FEW] = told(functools.partial(_is_faster, *args)) if native.can(*args, None) else False


def _is_faster(x: Tensor, weight: Tensor, scale: Tensor | None) -> bool:
    """Whether our product takes at most 4/3 of PyTorch's time: the best of five of each."""
    own, theirs = cold_seconds((native.few_rows, torch_linear), (x, weight, scale, None), 5)
    return min(own) < 4 / 3 * min(theirs)


def cold_seconds(ways: Sequence[Product], args: tuple[Tensor | None, ...], repeat: int) -> list[list[float]]:
    """Seconds of each way to a product, in turn, the weight driven out of the caches before each, as other layers would."""
    others = torch.empty(1 << 26, dtype=torch.int8)
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(repeat):
        for way, found in zip(ways, times):
            others.fill_(0)
            start = time.perf_counter()
            way(*args)
            found.append(time.perf_counter() - start)
    return times


def _on_cuda(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    from kernels import int8_linear_cuda  # needs Triton, which comes with PyTorch for CUDA

    return int8_linear_cuda(x, weight, scale, bias)


# an operation of its own, which compiled blocks call as it is; registered without torch.library.custom_op, whose checks at each
# call cost as much as a small product
_library = torch.library.Library("engine", "FRAGMENT")
_library.define("few_rows(Tensor x, Tensor weight, Tensor? scale, Tensor? bias) -> Tensor")
_library.impl("few_rows", _on_cpu, "CPU")
_library.impl("few_rows", _on_cuda, "CUDA")


@torch.library.register_fake("engine::few_rows", lib=_library)
def _(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    torch._check(x.shape[1] == weight.shape[1], lambda: f"{x.shape[1]} inputs for a weight of {weight.shape[1]}")
    return x.new_empty((x.shape[0], weight.shape[0]))


def few_rows(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """x [..., D_in] times weight [D_out, D_in] of the same dtype or int8, times its steps [D_out], plus bias. In x's dtype."""
    return torch.ops.engine.few_rows(x.flatten(0, -2), weight, scale, bias).unflatten(0, x.shape[:-1])


class Linear(nn.Linear):
    """x times weight transposed plus bias, by the product that suits the device, the dtype and the number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        small = x.dtype == torch.float32 and self.weight.nbytes < SMALL
        learning = torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad)
        if x.device.type != "cpu" or small or learning:
            return super().forward(x)
        return few_rows(x, self.weight, None, self.bias)

    def with_judge(self, row: Tensor, n: int) -> Linear:
        """This layer's first ``n`` rows and JUDGE_ROWS more, whose outputs sum to x · row."""
        extra = self.weight.new_zeros((JUDGE_ROWS, self.in_features))
        extra[0] = row.to(extra.dtype)
        made = Linear(self.in_features, n + JUDGE_ROWS, bias=False, device="meta")
        made.weight = nn.Parameter(torch.cat((self.weight.detach()[:n], extra)), requires_grad=False)
        return made


class Int8Linear(nn.Module):
    """x times (weight · scale) transposed plus bias: weight int8 [D_out, D_in], scale fp32 [D_out]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty((out_features, in_features), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(out_features, dtype=torch.float32), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    @staticmethod
    def quantize(weight: Tensor, largest: Tensor | None = None) -> dict[str, Tensor]:
        """int8 weight and fp32 scale of a weight [D_out, D_in]; the rounding error is at most half a step.

        Args:
            largest: largest magnitude of each whole row, fp32 [D_out], where ``weight`` is only some of its columns.
        """
        wide = weight.float()
        largest = wide.abs().amax(1) if largest is None else largest
        scale = torch.where(largest > 0, largest / 127, 1.0)
        return {"weight": (wide / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8), "scale": scale}

    @staticmethod
    def dequantize(parts: dict[str, Tensor]) -> Tensor:
        """The fp32 weight [D_out, D_in] that ``quantize``'s result stands for."""
        return parts["weight"].float() * parts["scale"][:, None]

    def forward(self, x: Tensor) -> Tensor:
        return few_rows(x, self.weight, self.scale, self.bias)

    def with_judge(self, row: Tensor, n: int) -> Int8Linear:
        """This layer's first ``n`` rows and JUDGE_ROWS more, whose outputs sum to x · row.

        The second of them holds what rounding took from the first, so the verdict has about 16 bits; the rows are there anyway.
        """
        rows = row.float().new_zeros((JUDGE_ROWS, self.in_features))
        rows[0] = row
        first = self.quantize(rows[:1])
        rows[1] = row - self.dequantize(first)[0]
        extra = self.quantize(rows)
        made = Int8Linear(self.in_features, n + JUDGE_ROWS).to(device="meta")
        made.weight = nn.Parameter(torch.cat((self.weight[:n], extra["weight"])), requires_grad=False)
        made.scale = nn.Parameter(torch.cat((self.scale[:n], extra["scale"])), requires_grad=False)
        return made


class Int4Linear(nn.Module):
    """x times the weight transposed plus bias, the weight in groups of ``group`` inputs, by PyTorch's packed kernels.

    weight is uint8 [D_out, D_in / 2] as it lies on disk (input 2i in the low half of a byte), scale bfloat16
    [D_out, D_in / group, 2] (step, zero), D_in padded to whole groups. ``pack`` turns both into the device's own layout, which
    ``forward`` needs.
    """

    ROWS: ClassVar[int] = 16  # the kernels take whole tiles of outputs

    def __init__(self, in_features: int, out_features: int, group: int, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features, self.group = in_features, out_features, group
        n_groups = -(-in_features // group)
        self.padding = n_groups * group - in_features
        self.weight = nn.Parameter(torch.empty((out_features, n_groups * group // 2), dtype=torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(torch.empty((out_features, n_groups, 2), dtype=torch.bfloat16), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    @staticmethod
    def quantize(weight: Tensor, group: int) -> dict[str, Tensor]:
        """Bytes and steps of a weight [D_out, D_in]; the rounding error is at most half a step, but for the group's ends.

        Steps and zeros are rounded to bfloat16 first, as the kernels take them, and the weights to those.
        """
        wide = F.pad(weight.float(), (0, -weight.shape[1] % group)).unflatten(1, (-1, group))
        low, high = wide.amin(-1), wide.amax(-1)
        step = torch.where(high > low, (high - low) / 15, 1.0).bfloat16()
        zero = torch.where(high > low, low + 8 * step.float(), low).bfloat16()
        q = ((wide - zero.float()[..., None]) / step.float()[..., None] + 8).round_().clamp_(0, 15).to(torch.uint8).flatten(1)
        return {"weight": q[:, ::2] | (q[:, 1::2] << 4), "scale": torch.stack((step, zero), -1)}

    @staticmethod
    def unpacked(weight: Tensor) -> Tensor:
        """The numbers 0 to 15, int32 [D_out, D_in], in the bytes of a weight."""
        return torch.stack((weight & 15, weight >> 4), -1).flatten(1).to(torch.int32)

    @staticmethod
    def dequantize(parts: dict[str, Tensor]) -> Tensor:
        """The fp32 weight [D_out, D_in] (padded to whole groups) that ``quantize``'s result stands for."""
        step, zero = (part[..., None] for part in parts["scale"].float().unbind(-1))
        q = Int4Linear.unpacked(parts["weight"]).unflatten(1, (step.shape[1], -1))
        return ((q - 8) * step + zero).flatten(1)

    def pack(self, dtype: torch.dtype) -> None:
        """Bring the weight into the layout of the device's kernel, for x of ``dtype``."""
        extra = -self.out_features % self.ROWS
        q = F.pad(self.unpacked(self.weight), (0, 0, 0, extra))
        scale = F.pad(self.scale, (0, 0, 0, 0, 0, extra)).transpose(0, 1)
        if q.device.type == "cpu":
            packed = torch._convert_weight_to_int4pack_for_cpu(q, 1)
        else:
            tiles = next(n for n in (8, 4, 2) if q.shape[1] % (16 * n) == 0)  # inner tiles: a group is at least two
            packed, dtype = torch._convert_weight_to_int4pack((q[:, ::2] << 4 | q[:, 1::2]).to(torch.uint8), tiles), torch.bfloat16
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.scale = nn.Parameter(scale.to(dtype).contiguous(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        product = torch._weight_int4pack_mm_for_cpu if x.device.type == "cpu" else torch._weight_int4pack_mm
        wide = F.pad(x, (0, self.padding)).flatten(0, -2).to(self.scale.dtype)  # CUDA's kernel takes bfloat16 alone
        out = product(wide, self.weight, self.group, self.scale)[:, : self.out_features].unflatten(0, x.shape[:-1]).to(x.dtype)
        return out if self.bias is None else out + self.bias


def quantized(weight: Tensor, mode: str, largest: Tensor | None = None) -> dict[str, Tensor]:
    """The parameters of ``make_linear``'s layer for a floating-point weight. ``largest``: see ``Int8Linear.quantize``."""
    pieces = []
    rows = max(1, (1 << 24) // weight.shape[1])  # some at a time: in fp32 a large weight would take much room
    for start in range(0, weight.shape[0], rows):
        part = weight[start : start + rows]
        if mode == "int8":
            pieces.append(Int8Linear.quantize(part, None if largest is None else largest[start : start + rows]))
        else:
            pieces.append(Int4Linear.quantize(part, group_of(mode)))
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def group_of(mode: str) -> int:
    """Inputs that share a step in an int4 mode."""
    return int(mode.removeprefix("int4-g"))


def make_linear(in_features: int, out_features: int, bias: bool, mode: str) -> Linear | Int8Linear | Int4Linear:
    """A layer whose weight is kept in the form ``mode``: ``none`` or one of MODES."""
    if mode == "none":
        return Linear(in_features, out_features, bias)
    if mode == "int8":
        return Int8Linear(in_features, out_features, bias)
    return Int4Linear(in_features, out_features, group_of(mode), bias)
