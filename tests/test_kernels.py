"""The Triton kernel, run by Triton's interpreter on the CPU, against the plain expression."""

from __future__ import annotations

import pytest
import torch
from kernel_report import products
from shapes import shape

kernels = pytest.importorskip("kernels")

# every product of a layer, and the output projection with the judge's rows, as one rank has them
PRODUCTS = {
    (name, size, product): sizes
    for name in ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b")
    for size in (1, 2, 8)
    for product, sizes in products(shape(name), size).items()
}


def operands(T, N, K, dtype=torch.float16, bias=False):
    generator = torch.Generator().manual_seed(T * N + K)
    x = torch.randn(T, K, generator=generator).to(dtype)
    weight = torch.randint(-127, 128, (N, K), generator=generator, dtype=torch.int8)
    scale = torch.rand(N, generator=generator) / 127
    return x, weight, scale, torch.randn(N, generator=generator).to(dtype) if bias else None


def exact(x, weight, scale, bias):
    out = x.double() @ (weight.double() * scale.double()[:, None]).t()
    return out if bias is None else out + bias.double()


def is_near(out, args, slack=1e-4):
    """Whether it is right to the last place, and to ``slack`` of what outputs are like."""
    wanted = exact(*args)
    step = torch.finfo(out.dtype).eps
    return bool(((out.double() - wanted).abs() <= 1.01 * step * wanted.abs() + slack * wanted.std()).all())


def scaled(N, K):
    """A product with the same remainders by a tile's sides, small enough for the interpreter."""
    return N % 128 + 128 * (1 + N // 128 % 3), K % 128 + 128 * (1 + K // 128 % 4)


@pytest.mark.parametrize("T", [1, 26])
def test_every_product_of_the_llamas_is_the_plain_one(T):
    done = set()
    for N, K in PRODUCTS.values():
        sizes = scaled(N, K)
        if sizes in done:
            continue
        done.add(sizes)
        args = operands(T, *sizes)
        plan = kernels.plan_for(*sizes, processors=4)
        assert is_near(kernels.int8_product(*args, plan), args), (N, K, plan)
    assert len(done) >= 4


@pytest.mark.parametrize("T", [1, 2, 16, 17, 40, 64])
@pytest.mark.parametrize("split", [1, 3])
def test_any_number_of_rows_with_and_without_bias(T, split):
    for N, K, bias in ((37, 90, True), (130, 300, False)):
        args = operands(T, N, K, torch.float16, bias)  # the interpreter can't multiply bfloat16
        out = kernels.int8_product(*args, kernels.Plan(32, 32, split, 4, 3))
        assert out.dtype == torch.float16 and out.shape == (T, N) and is_near(out, args)


@pytest.mark.parametrize("dtype, slack", [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_the_plain_expression_is_right_too(dtype, slack):
    x, weight, scale, bias = operands(5, 40, 16384, dtype, True)
    weight[0] = 127  # in float16 sums of this size are beyond its range
    args = x.abs(), weight, scale, bias
    assert is_near(kernels.plain(*args), args, slack)


def test_parts_are_added_in_their_order_and_leave_nothing_behind():
    args = operands(5, 100, 700)
    plan = kernels.Plan(32, 64, 4, 4, 3)
    first = kernels.int8_product(*args, plan)
    assert torch.equal(first, kernels.int8_product(*args, plan))
    for sums, arrived in kernels._scratch[args[0].device]:
        assert not arrived.any()
        sums.fill_(float("nan"))  # what an earlier product left must not matter
    assert torch.equal(first, kernels.int8_product(*args, plan))


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_plan_reads_every_input_once_and_keeps_a_gpu_busy(product):
    N, K = PRODUCTS[product]
    for plan in kernels.plans_for(N, K, 132):
        blocks, steps = -(-N // plan.block_n), -(-K // plan.block_k)
        share = -(-steps // plan.split)
        assert share * plan.split >= steps > share * (plan.split - 1)  # every step is somebody's, and nobody is without
        assert blocks * plan.split >= 132 or plan.split >= min(16, steps // 2) or share <= 3
    least, planned = kernels.bytes_moved(26, N, K, kernels.plan_for(N, K, 132))
    assert least >= N * K and planned < 2.5 * least


def test_the_fastest_way_is_taken_and_measured_once(monkeypatch):
    args = operands(3, 64, 256)
    times, asked = {}, []

    def fake(run):
        asked.append(run)
        run()
        return times.get(len(asked), 1.0)

    monkeypatch.setattr(kernels, "seconds", fake)
    monkeypatch.setattr(kernels, "_chosen", {})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("P", (), {"multi_processor_count": 4}))
    times[3] = 0.5
    assert is_near(kernels.int8_linear_cuda(*args), args)
    ((key, plan),) = kernels._chosen.items()
    assert plan == kernels.plans_for(64, 256, 4)[1] and len(asked) == 5
    kernels.int8_linear_cuda(*args)
    assert len(asked) == 5
    wide = operands(kernels.MOST_ROWS + 1, 64, 256)
    assert is_near(kernels.int8_linear_cuda(*wide), wide, 2e-3) and len(asked) == 5  # more rows aren't its business
    times[6] = 0.1
    kernels.int8_linear_cuda(*operands(20, 64, 256))
    assert list(kernels._chosen.values())[1] is None  # the plain expression may win too


def test_a_plan_that_a_device_has_no_room_for_is_not_taken(monkeypatch):
    """Smaller GPUs have less shared memory than the plans are made for."""
    monkeypatch.setattr(kernels, "_chosen", {})
    monkeypatch.setattr(kernels, "seconds", lambda run: float(run()))

    def run(way):
        if way == "large":
            raise kernels.OutOfResources(139264, 101376, "shared memory")
        return {None: 2.0, "small": 1.0}[way]

    assert kernels.fastest(("some",), lambda: ["large", "small"], run) == "small"
    assert kernels.fastest(("other",), lambda: ["large"], run) is None
