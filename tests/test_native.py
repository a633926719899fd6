"""The products in C++ against exact ones; that they don't depend on who is multiplied together; and life without a compiler."""

from __future__ import annotations

import platform
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import linear
import native
from linear import Int8Linear, Linear, few_rows

needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
FLOAT, BFLOAT, INT8 = torch.float32, torch.bfloat16, torch.int8
FORMS = [(FLOAT, FLOAT), (BFLOAT, BFLOAT), (FLOAT, INT8), (BFLOAT, INT8)]


def operands(T, N, K, x_dtype, w_dtype, bias=True):
    source = torch.Generator().manual_seed(T + N + K)
    if w_dtype == torch.int8:
        weight, scale = torch.randint(-127, 128, (N, K), generator=source, dtype=torch.int8), torch.rand(N, generator=source)
    else:
        weight, scale = torch.randn(N, K, generator=source).to(w_dtype), None
    x = torch.randn(T, K, generator=source).to(x_dtype)
    return x, weight, scale, torch.randn(N, generator=source).to(x_dtype) if bias else None


def exact(x, weight, scale, bias):
    out = x.double() @ weight.double().t()
    out = out if scale is None else out * scale.double()
    return out if bias is None else out + bias.double()


def lost(x, weight, scale, share):
    """What an output may be off by, where each input is by ``share`` of the largest of the 512 that share its step."""
    pieces = zip(x.double().abs().split(512, 1), weight.double().abs().split(512, 1))
    error = sum(share * piece.amax(1, keepdim=True) * part.sum(1) for piece, part in pieces)
    return error if scale is None else error * scale.double()


@needs_compiler
@settings(deadline=None, max_examples=120)
@given(st.integers(1, 64), st.integers(1, 40), st.integers(1, 2500), st.sampled_from(FORMS), st.booleans())
def test_a_product_is_the_exact_one_rounded(T, N, K, form, bias):
    args = operands(T, N, K, *form, bias)
    out, wanted = native.few_rows(*args), exact(*args)
    assert out.dtype == form[0] and out.shape == (T, N)
    error = 1e-6 * lost(*args[:3], 1) + (lost(*args[:3], 1 / 65530) if form == (BFLOAT, INT8) else 0)
    assert ((out.double() - wanted).abs() <= error + torch.finfo(form[0]).eps * wanted.abs()).all()


@needs_compiler
def test_an_outlier_costs_only_its_own_piece_of_the_row():
    x, weight, scale, _ = operands(3, 20, 1600, BFLOAT, INT8)
    x[1, 700] = 3e4
    out, wanted = native.few_rows(x, weight, scale, None).double(), exact(x, weight, scale, None)
    assert ((out - wanted).abs() <= lost(x, weight, scale, 1 / 65530) + torch.finfo(BFLOAT).eps * wanted.abs()).all()
    x[:, 700] = 0.0
    quiet = native.few_rows(x, weight, scale, None)
    assert torch.equal(quiet[0], native.few_rows(x[:1], weight, scale, None)[0])


@needs_compiler
@pytest.mark.parametrize("odd", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_number_is_never_hidden(odd, form):
    x, weight, scale, _ = operands(5, 8, 1100, *form)
    weight[:] = 1
    x[2, 1050] = odd
    out = native.few_rows(x, weight, scale, None)
    assert not out[2].isfinite().any() and out[[0, 1, 3, 4]].isfinite().all()


@needs_compiler
@settings(deadline=None, max_examples=60)
@given(st.integers(1, 64), st.integers(1, 30), st.integers(1, 2500), st.sampled_from(FORMS), st.integers(0, 63))
def test_a_rows_product_does_not_depend_on_the_other_rows(T, N, K, form, at):
    x, *rest = operands(T, N, K, *form)
    at %= T
    assert torch.equal(native.few_rows(x, *rest)[at : at + 1], native.few_rows(x[at : at + 1], *rest))


@needs_compiler
def test_the_number_of_threads_changes_nothing():
    args = operands(5, 600, 700, torch.bfloat16, torch.int8)
    one = native.few_rows(*args)
    torch.set_num_threads(3)
    try:
        assert torch.equal(native.few_rows(*args), one)
    finally:
        torch.set_num_threads(1)


@needs_compiler
def test_bfloat16_is_rounded_to_even_and_keeps_what_is_no_number():
    values = torch.tensor([1.00390625, 1.01171875, float("inf"), float("nan"), -3.0, 1e-40])  # the first two are ties
    most = values.bfloat16()
    rest = (values - most.float()).nan_to_num(0, 0, 0).bfloat16()
    out = native.few_rows(torch.ones(1, 2).bfloat16(), torch.stack((most, rest), 1), None, None)[0]
    assert torch.equal(out, values.bfloat16()) or torch.equal(out.isnan(), values.isnan())
    assert torch.equal(out[[0, 1, 2, 4, 5]], values.bfloat16()[[0, 1, 2, 4, 5]])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ours", [False, True])
def test_the_faster_way_is_chosen_once_for_one_row_and_for_a_block(monkeypatch, form, ours):
    monkeypatch.setattr(linear, "_native", {})
    monkeypatch.setattr(linear, "SMALL", 0)
    asked, taken = [], []
    monkeypatch.setattr(linear, "_is_faster", lambda x, *rest: asked.append(len(x)) or ours)
    right = native.few_rows
    monkeypatch.setattr(native, "few_rows", lambda *args: taken.append(args) or right(*args))
    for _ in range(2):
        linear.choose(form[0], "int8" if form[1] == INT8 else "none")
    for T in (1, 2, 5, 64, 65):
        args = operands(T, 40, 90, *form)
        torch.testing.assert_close(few_rows(*args).double(), exact(*args), atol=1.5, rtol=0.02)
    if native.library() is not None:
        assert asked == [1, 16]
        many = 2 if form[1] == INT8 else 0  # more than 64 rows are ours, in parts, where the weight must be widened
        assert len(taken) == (4 + many if ours else 0)


def test_measuring_finds_a_winner(monkeypatch):
    x, weight, *_ = operands(1, 300, 400, FLOAT, FLOAT)
    monkeypatch.setattr(linear, "torch_linear", lambda *args: time.sleep(0.02))
    monkeypatch.setattr(native, "few_rows", lambda *args: None)
    assert linear._is_faster(x, weight, None)
    monkeypatch.setattr(native, "few_rows", lambda *args: time.sleep(0.04))
    assert not linear._is_faster(x, weight, None)


@needs_compiler
def test_what_does_not_fit_is_refused_and_never_read():
    x, weight, scale, bias = operands(3, 40, 90, BFLOAT, INT8)
    assert native.can(x, weight, scale, bias)
    assert not native.can(x, weight.float(), scale, bias)
    for args in (
        (x[:, :80], weight, scale, bias), (x, weight, scale.bfloat16(), bias), (x, weight, scale[:-1], bias),
        (x, weight, scale, bias[:-1]), (x.half(), weight, scale, bias), (x, weight.t().contiguous().t(), scale, bias),
        (x[:0], weight, scale, bias), (x, weight, torch.rand(80)[::2], bias),
    ):  # fmt: skip
        assert not native.can(*args)
    with pytest.raises(RuntimeError):
        few_rows(torch.randn(2, 700), torch.randn(1200, 600), None, None)


def test_a_frozen_layer_passes_gradients_on():
    layer = Linear(600, 1000, bias=False).requires_grad_(False)
    x = torch.randn(3, 600, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(3, 600))


def test_without_a_compiler_the_layers_still_work(tmp_path):
    program = """
import torch, native
from linear import Int8Linear, Linear
assert native.library() is None
for layer in (Linear(512, 2100, bias=False).requires_grad_(False), Linear(512, 2100, bias=False).bfloat16().requires_grad_(False)):
    x = torch.randn(5, 512).to(layer.weight.dtype)
    torch.testing.assert_close(layer(x).float(), x.float() @ layer.weight.float().t(), atol=0.05, rtol=0.05)
"""
    env = {"PATH": "/nowhere", "HOME": str(tmp_path), "PYTHONPATH": str(native.SOURCES[0].parent)}
    subprocess.run([sys.executable, "-c", program], check=True, env=env)


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """An empty cache, and compilations that take a second."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "FLAGS", ("-O0", "-fno-inline", "-march=native", "-std=c++17", "-fPIC", "-fopenmp"))


@needs_compiler
def test_it_is_compiled_once_into_the_users_cache(tmp_path, monkeypatch, quick):
    assert native.library.__wrapped__() is not None
    (file,) = (tmp_path / "judge-decoding").iterdir()
    before = file.stat().st_mtime_ns
    assert native.library.__wrapped__() is not None
    assert file.stat().st_mtime_ns == before
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-DUNUSED"))
    native.library.__wrapped__()
    assert len(list((tmp_path / "judge-decoding").iterdir())) == 2
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-DAGAIN"))
    cut_short = native._file(["g++"])
    cut_short.touch()
    assert native.library.__wrapped__() is not None and cut_short.stat().st_size > 1000


@needs_compiler
@pytest.mark.parametrize("changes, said", [
    ({"XDG_CACHE_HOME": "/proc/nowhere"}, "/proc/nowhere"),
    ({"CXX": "{file}"}, "Exec format"),
    ({"CXX": "g++ --no-such-option"}, "no-such-option"),
])  # fmt: skip
def test_where_it_cannot_be_compiled_it_says_why(tmp_path, monkeypatch, capsys, quick, changes, said):
    (tmp_path / "file").write_bytes(b"\0")
    (tmp_path / "file").chmod(0o755)
    for name, value in changes.items():
        monkeypatch.setenv(name, value.format(file=tmp_path / "file"))
    assert native.library.__wrapped__() is None
    printed = capsys.readouterr().err
    assert printed.startswith("native.cpp wasn't compiled") and said in printed


@needs_compiler
def test_options_of_the_compiler_and_another_users_folder(monkeypatch, quick):
    monkeypatch.setenv("CXX", "g++ -DUNUSED")
    assert native.library.__wrapped__() is not None
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert native.library.__wrapped__() is None


@needs_compiler
@pytest.mark.parametrize("given", [" ", "g++ '"])
def test_where_cxx_names_nothing_it_is_the_usual_compiler(monkeypatch, quick, given):
    monkeypatch.setenv("CXX", given)
    assert native.library.__wrapped__() is not None


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other names of processors")
@pytest.mark.parametrize("vectors", ["sse2", "avx", "fma", "avx2", "avx512f", "avx512bw"])
def test_every_kind_of_vectors_is_known(vectors):
    flags = [flag for flag in native.FLAGS if flag != "-march=native"]
    subprocess.run(["g++", *flags, "-march=x86-64", f"-m{vectors}", "-fsyntax-only", native.SOURCES[0]], check=True)


@pytest.mark.parametrize("rows", [1, 2, 26])
def test_large_layers_go_through_it_compiled_or_not(rows):
    torch.manual_seed(0)
    layers = [Linear(600, 1000, bias=True).requires_grad_(False), Int8Linear(600, 2000)]
    layers[1].load_state_dict(Int8Linear.quantize(torch.randn(2000, 600)))
    x = torch.randn(rows, 600)
    for layer in layers:
        assert layer.weight.nbytes >= linear.SMALL
        weight = layer.weight if isinstance(layer, Linear) else Int8Linear.dequantize(layer.state_dict())
        torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, weight, layer.bias), atol=2e-4, rtol=1e-4)
        assert torch.equal(torch.compile(layer, dynamic=True)(x), layer(x))


def test_the_op_is_what_tracing_expects():
    args = operands(3, 40, 90, torch.bfloat16, torch.int8)
    torch.library.opcheck(torch.ops.engine.few_rows.default, args, test_utils=("test_schema", "test_faketensor"))
