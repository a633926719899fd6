"""The GPU check as far as a CPU goes: its checks can pass and fail, its commands are commands, its sums are right."""

from __future__ import annotations

import sys

import benchmark
import gpu_check
import pytest
import shapes
import torch

from errors import UserError

kernels = pytest.importorskip("kernels")


@torch.inference_mode()
def test_texts_are_compared(monkeypatch):
    monkeypatch.setattr(gpu_check, "CASES", gpu_check.CASES[:2])
    said = gpu_check.check_right("cpu", tokens=15)
    assert said["graphs_agree"]
    assert [row["as_cpu"] for row in said["rows"]] == [45, 45]


@pytest.mark.parametrize("wrong", [False, True])
@torch.inference_mode()
def test_kernels_are_compared(monkeypatch, wrong):
    monkeypatch.setitem(shapes.ROWS, "small", ("Llama", 256, 2, 8, 4, 128, 512, 512, 1e4, False))
    if wrong:
        right = kernels.int8_product
        monkeypatch.setattr(kernels, "int8_product", lambda *args: right(*args) * 1.01)
    said = gpu_check.check_kernels("cpu", [("small", 1)], (1, 5), lambda run: (run(), 2e-6)[1])
    assert said["right"] != wrong
    assert {row["rows"] for row in said["products"]} == {1, 5}
    assert said["products"][0]["gb_s"] == pytest.approx(512 * 256 / 2e-6 / 1e9)


def test_every_part_is_a_command_and_all_fit_into_the_time():
    parts = gpu_check.parts()
    assert sum(limit for _, limit in parts.values()) <= 10 * 60 + 30  # limits; the parts take about half
    for command, _ in parts.values():
        if "benchmark.py" in command[1]:
            benchmark.parse_args([*command[2:], "--device", "cpu"])


def test_the_forecast_adds_the_collectives():
    row = {"round_ms": [30.0, 29.0, 31.0], "draft_len": 25, "mean_accepted": 19.7, "draft_step_ms": [0.7], "verify_ms": [19.0]}
    found = gpu_check.forecast({"shard-405b": {"settings": {"judge": row}}, "shard-70b": {"failed": "out of memory"}})
    assert list(found) == ["shard-405b"]
    # 25 steps of 2 * 32 + 2 sums and one pass of 2 * 126 + 2, of 9 us each, and a little for their bytes
    assert found["shard-405b"]["collectives_ms"] == pytest.approx((25 * 66 + 254) * 9e-3, rel=0.15)
    assert found["shard-405b"]["tokens_per_s"] == pytest.approx(20.7e3 / (30 + found["shard-405b"]["collectives_ms"]))


def test_a_part_that_fails_or_hangs_says_so():
    assert "boom" in gpu_check.run_part("x", [sys.executable, "-c", "raise ValueError('boom')"], 20)["failed"]
    assert gpu_check.run_part("x", [sys.executable, "-c", "import time; time.sleep(9)"], 0.3) == {"failed": "took more than 0 s"}
    assert gpu_check.run_part("x", [sys.executable, "-c", "print('{\"a\": 1}')"], 20)["a"] == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu_check.py"])
    with pytest.raises(UserError, match="no CUDA device"):
        gpu_check.main()
