"""Weights in 16, 8 and 4 bits: how far rounding may go, and products against what the numbers stand for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from linear import JUDGE_ROWS, MODES, Int4Linear, Int8Linear, Linear, make_linear, quantized, wide_linear


def random(shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer_of(weight, mode, bias=None, dtype=torch.float32):
    """A packed layer and the fp32 weight it stands for."""
    layer = make_linear(weight.shape[1], weight.shape[0], bias is not None, mode)
    parts = quantized(weight, mode)
    kind = Int8Linear if mode == "int8" else Int4Linear
    layer.load_state_dict(parts if bias is None else {**parts, "bias": bias.to(dtype)}, assign=True)
    if isinstance(layer, Int4Linear):
        layer.pack(dtype)
    return layer, kind.dequantize(parts)[:, : weight.shape[1]]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 9), st.integers(1, 70), st.floats(-30, 30), st.integers(0, 99))
def test_int8_rounds_by_half_a_step_at_most(n_out, n_in, exponent, seed):
    weight = random((n_out, n_in), seed) * 2.0**exponent
    weight[0] = 0
    parts = Int8Linear.quantize(weight)
    assert parts["weight"].dtype == torch.int8 and parts["scale"].dtype == torch.float32
    assert ((Int8Linear.dequantize(parts) - weight).abs() <= parts["scale"][:, None] * 0.50001).all()


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([32, 128]), st.integers(1, 9), st.integers(1, 300), st.floats(-10, 10), st.integers(0, 99))
def test_int4_rounds_by_half_a_step_at_most_but_at_the_ends(group, n_out, n_in, mean, seed):
    weight = random((n_out, n_in), seed) + mean
    parts = Int4Linear.quantize(weight, group)
    assert parts["weight"].dtype == torch.uint8
    step, zero = parts["scale"].float().repeat_interleave(group, 1)[:, :n_in].unbind(-1)
    # step and zero are bfloat16: at the ends that may add the rounding of the zero and eight roundings of the step
    allowed = 0.5 * step + zero.abs() / 256 + 8 * step / 256
    assert ((Int4Linear.dequantize(parts)[:, :n_in] - weight).abs() <= allowed * 1.001).all()


def test_int4_keeps_a_group_of_equal_weights():
    weight = torch.tensor([[0.01] * 32, [0.0] * 32, [-300.0] * 32, [1e-6] * 32]).bfloat16()
    assert torch.equal(Int4Linear.dequantize(Int4Linear.quantize(weight, 32)), weight.float())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 26])
def test_a_product_is_that_of_the_numbers_its_weight_stands_for(mode, dtype, rows):
    for n_out, n_in in ((64, 128), (48, 80), (16, 256), (21, 64)):
        weight, bias, x = random((n_out, n_in), 1), random(n_out, 2), random((rows, n_in), 3, dtype)
        layer, stands_for = layer_of(weight, mode, bias, dtype)
        exact = F.linear(x.double(), stands_for.double(), bias.to(dtype).double())
        limit = 1e-5 if dtype == torch.float32 else 0.02
        assert layer(x).dtype == dtype and (layer(x).double() - exact).abs().max() < limit * exact.abs().max(), (n_out, n_in)
        assert layer(x.unflatten(0, (1, rows))).shape == (1, rows, n_out)


def test_int8_columns_of_several_ranks_are_those_of_the_whole():
    weight = random((12, 64))
    whole = Int8Linear.quantize(weight)
    for part, columns in (
        (Int8Linear.quantize(weight[:, a : a + 16], weight.abs().amax(1)), slice(a, a + 16)) for a in range(0, 64, 16)
    ):
        assert torch.equal(part["weight"], whole["weight"][:, columns]) and torch.equal(part["scale"], whole["scale"])


@pytest.mark.parametrize("mode, limit", [("none", 1e-6), ("int8", 1e-4)])
def test_the_judges_row_keeps_its_precision(mode, limit):
    weight, row, x = random((32, 256)), random(256, 1), random((7, 256), 2)
    layer = layer_of(weight, mode)[0] if mode != "none" else Linear(256, 32, bias=False)
    if mode == "none":
        layer.weight.data = weight
    fused = layer.with_judge(row, 32)
    out = fused(x)
    assert out.shape == (7, 32 + JUDGE_ROWS) and torch.allclose(out[:, :32], layer(x), atol=1e-5)
    assert (out[:, 32:].sum(-1) - x @ row).abs().max() < limit * (x @ row).abs().max()
    again = fused.with_judge(-row, 32)  # takes the place of the first
    assert again(x).shape == out.shape and torch.allclose(again(x)[:, 32:].sum(-1), -out[:, 32:].sum(-1), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8])
def test_the_widened_product_sums_in_fp32(dtype):
    n_out, n_in = 700, 1000  # several pieces, the last of them smaller
    weight = random((n_out, n_in)).to(dtype) if dtype != torch.int8 else torch.randint(-127, 128, (n_out, n_in), dtype=dtype)
    x = random((17, n_in), 1, torch.bfloat16)
    exact = x.double() @ weight.double().t()
    torch.testing.assert_close(wide_linear(x, weight).double(), exact, atol=exact.std().item() * 1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_of_16_bits_is_near_the_exact_product(dtype):
    layer = Linear(1000, 700, bias=True).to(dtype)
    for rows in (1, 2, 3, 17):
        x = random((rows, 1000), 1, dtype)
        exact = F.linear(x.double(), layer.weight.double(), layer.bias.double())
        assert (layer(x).double() - exact).abs().max() < 0.01 * exact.abs().max()


@pytest.mark.parametrize("mode", MODES)
def test_a_large_weight_is_quantized_piece_by_piece_to_the_same(mode):
    weight = random((300, 70_000)).bfloat16()  # two pieces
    kind = Int8Linear.quantize(weight) if mode == "int8" else Int4Linear.quantize(weight, int(mode[6:]))
    for name, value in quantized(weight, mode).items():
        assert torch.equal(value, kind[name])
