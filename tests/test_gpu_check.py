"""The GPU check as far as a CPU goes: its checks can pass and fail, its commands are commands, its sums are right."""

from __future__ import annotations

import json
import sys

import benchmark
import gpu_check
import pytest
import shapes
import torch

import attention
from errors import UserError

kernels = pytest.importorskip("kernels")


@torch.inference_mode()
def test_texts_are_compared(monkeypatch):
    monkeypatch.setattr(gpu_check, "CASES", [*gpu_check.CASES[:2], gpu_check.CASES[4]])
    said = gpu_check.check_right("cpu", tokens=15)
    assert said["right"] and all(row["graph_as_it_is"] for row in said["rows"])
    assert [row["as_cpu"] for row in said["rows"]] == [1, 1, None, None]
    monkeypatch.setattr(gpu_check, "common_length", lambda a, b: 5)  # texts that part early are no rounding
    assert not gpu_check.check_right("cpu", tokens=15)["right"]


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


@pytest.mark.parametrize("wrong", [False, True])
@torch.inference_mode()
def test_attention_is_compared(monkeypatch, wrong):
    monkeypatch.setitem(shapes.ROWS, "small", ("Llama", 256, 2, 8, 4, 16, 512, 512, 1e4, False))
    if wrong:
        right = attention.divided
        monkeypatch.setattr(attention, "divided", lambda *args: right(*args) * 1.01)
    said = gpu_check.check_attention("cpu", [("small", 2)], (1, 3), 128, lambda run: 2e-6)
    assert said["right"] != wrong and [row["tokens"] for row in said["attention"]] == [1, 3]
    assert all(row["sdpa_us"] == 2 and row["sdpa_error"] < 2 for row in said["attention"])


def test_every_part_is_a_command():
    for command, _ in gpu_check.parts().values():
        if "benchmark.py" in command[1]:
            benchmark.parse_args([*command[2:], "--device", "cpu"])


def test_the_forecast_adds_the_collectives():
    row = {"round_ms": [30.0, 29.0, 31.0], "draft_len": 25, "mean_accepted": 19.7, "draft_step_ms": [0.7], "verify_ms": [19.0]}
    found = gpu_check.forecast({"shard-405b": {"settings": {"judge": row}}, "shard-70b": {"failed": "out of memory"}})
    assert list(found) == ["shard-405b"]
    # 25 steps of 2 * 32 + 1 sums and one pass of 2 * 126 + 1, of 9 us each and their bytes, and 26 of NCCL's exchanges
    verify = 253 * (9e-3 + 7 * 2 * 26 * 16384 / 450e6)
    assert found["shard-405b"]["collectives_ms"] == pytest.approx(25 * 65 * 9e-3 + verify + 26 * 18e-3, rel=0.02)
    assert found["shard-405b"]["tokens_per_s"] == pytest.approx(20.7e3 / (30 + found["shard-405b"]["collectives_ms"]))


def test_a_part_that_fails_or_hangs_says_so():
    assert "boom" in gpu_check.run_part("x", [sys.executable, "-c", "raise ValueError('boom')"], 20)["failed"]
    hangs = "import sys, time; print('at work', file=sys.stderr, flush=True); time.sleep(60)"
    assert gpu_check.run_part("x", [sys.executable, "-c", hangs], 3)["failed"] == "took more than 3.0 s; last said: at work\n"
    assert gpu_check.run_part("x", [sys.executable, "-c", "print('{\"a\": 1}')"], 20)["a"] == 1


def test_it_ends_in_time_keeps_what_was_known_and_says_what_failed(monkeypatch, tmp_path, capsys):
    clock, given = [0.0], []

    def run_part(name, command, limit):
        given.append((name, limit))
        clock[0] += limit
        return {"failed": "hung"} if name == "right" else {"right": True}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(gpu_check, "run_part", run_part)
    monkeypatch.setattr(gpu_check.time, "perf_counter", lambda: clock[0])
    out = tmp_path / "check.json"
    out.write_text('{"earlier": 1}')
    monkeypatch.setattr("sys.argv", ["gpu_check.py", "--out", str(out)])
    with pytest.raises(SystemExit):
        gpu_check.main()
    assert sum(limit for _, limit in given) <= gpu_check.DEADLINE_S
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["failed"][0] == "right" and "kernels" in said["failed"]  # hung; no time left
    assert json.loads(out.read_text())["earlier"] == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu_check.py"])
    with pytest.raises(UserError, match="no CUDA device"):
        gpu_check.main()
