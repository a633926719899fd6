"""The forecast of a round: its sums, what it makes of measurements, and the published figures it is held against."""

from __future__ import annotations

import json

import pytest
import roofline
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import shape
from test_convert_hf_checkpoint import hf_model

from convert_hf_checkpoint import convert
from errors import UserError
from quantize import main as quantize

COMMAND = "--target llama-3.1-405b --draft llama-3.1-8b --gpu h100 --nproc 8 --quantize int8 --draft-len 25 --acceptance 19.7"


def run(capsys, monkeypatch, command):
    monkeypatch.setattr("sys.argv", ["roofline.py", *command.split(), "--json"])
    roofline.main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_headlines_command(capsys, monkeypatch):
    said = run(capsys, monkeypatch, COMMAND)
    assert said["round_ms"] == pytest.approx(25 * said["draft_ms"] + said["verify_ms"] + said["other_ms"])
    assert said["tokens_per_s"] == pytest.approx(20.7e3 / said["round_ms"])
    # 405B less the embedding in int8, and 25 times the 8B, over 8 ranks at 3.35 TB/s
    weights = (405.85e9 - 128256 * 16384) + 25 * (8.03e9 - 128256 * 4096)
    assert said["bound_tokens_per_s"] == pytest.approx(20.7 / (weights / 8 / 3.35e12), rel=0.02)
    assert said["bound_tokens_per_s"] > said["tokens_per_s"] > 290
    assert 250 < run(capsys, monkeypatch, COMMAND + " --attention sdpa")["tokens_per_s"] < 270


def test_a_draft_on_every_rank_has_no_collectives(capsys, monkeypatch):
    said = run(capsys, monkeypatch, COMMAND + " --draft-tp 1")
    assert said["terms"]["draft"]["collectives"] == 0 < said["terms"]["verify"]["collectives"]
    assert said["terms"]["draft"]["bytes"] > 7 * run(capsys, monkeypatch, COMMAND)["terms"]["draft"]["bytes"]


def test_the_search_is_no_worse_than_any_length(capsys, monkeypatch):
    best = run(capsys, monkeypatch, COMMAND + " --search")["tokens_per_s"]
    for M in (1, 5, 16, 25, 40):
        accepted = roofline.acceptance_curve("19.7", 25)[M - 1]
        command = COMMAND.replace("--draft-len 25", f"--draft-len {M}").replace("19.7", str(accepted))
        assert run(capsys, monkeypatch, command)["tokens_per_s"] <= best * 1.001


def test_several_drafts_are_sorted_by_speed(capsys, monkeypatch):
    said = run(capsys, monkeypatch, "--nproc 8 --quantize int8 --search --draft llama-3.2-1b=6 llama-3.1-8b=19.7")
    assert "8b" in said["draft"] and "1b" in said["others"][0]["draft"]
    assert said["tokens_per_s"] > said["others"][0]["tokens_per_s"]


@pytest.mark.parametrize("gpu", list(roofline.GPUS))
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_nothing_beats_the_bound_and_bandwidth_only_helps(gpu, quantize):
    machine = roofline.GPUS[gpu]
    for ranks in (1, 2, 8):
        model = roofline.model_of(shape("llama-3.1-70b"), ranks, quantize)
        f = roofline.forecast(model, None, machine, 0, 0.0, 1024)
        assert f.round_ms > f.bound_ms
        faster = roofline.replace(machine, bandwidth=2 * machine.bandwidth)
        assert roofline.forecast(model, None, faster, 0, 0.0, 1024).round_ms < f.round_ms


def test_bytes_of_a_pass_are_those_of_the_weights():
    whole = roofline.model_of(shape("llama-3.1-8b"), 1, "none")
    assert whole.bytes == pytest.approx(2 * (8.03e9 - 128256 * 4096), rel=0.002)
    assert 2 * whole.weights == pytest.approx(whole.bytes, rel=0.001)  # all but the norms
    assert whole.position_bytes == 2 * 2 * 32 * 8 * 128
    assert roofline.model_of(shape("llama-3.1-8b"), 8, "none").bytes == pytest.approx(whole.bytes / 8, rel=0.001)


@given(st.floats(0.01, 0.99), st.integers(1, 64))
def test_a_chance_is_found_again_from_its_mean(chance, M):
    assert roofline.chance_for(roofline.mean_accepted(chance, M), M) == pytest.approx(chance, abs=1e-6)


def bench_file(folder, passes, device="cpu", dtype="bfloat16", quantize="none"):
    file = folder / "bench.json"
    machine = {"device": device, "read_gb_s": 25.0}
    file.write_text("a table\n" + json.dumps({"passes": passes, "machine": machine, "dtype": dtype, "quantize": quantize}))
    return file


CPU = roofline.Machine("cpu", 3e10, 1e11, cpu=True)


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-11, 1e-9), st.floats(0.5, 200), st.floats(1, 20))
def test_calibration_finds_the_machine_again(tmp_path_factory, per_byte, kernel_us, slope):
    """Passes of two models on a made-up machine; a third model's are then forecast exactly, keys and values included."""

    def ms(model, rows, positions):
        kernels = (roofline.KERNELS_A_LAYER * model.layers + roofline.KERNELS_A_PASS) * kernel_us * 1e-6
        return 1e3 * (kernels + (model.bytes + positions * model.position_bytes) * per_byte * (1 + slope * (rows - 1)))

    models = [roofline.model_of(shape(name), 1, "none") for name in ("qwen2.5-0.5b", "qwen2.5-1.5b", "llama-3.2-1b")]
    passes = [
        {"rows": rows, "ms": ms(m, rows, 300), "read_bytes": m.bytes + 300 * m.position_bytes, "layers": m.layers}
        for m in models[:2] for rows in (1, 26)
    ]  # fmt: skip
    machine = roofline.calibrated(CPU, bench_file(tmp_path_factory.mktemp("bench"), passes), {"bfloat16"})
    assert machine.bandwidth == 25e9
    for rows in (1, 10, 26):
        found = sum(roofline.pass_terms(models[2], machine, rows, 1000).values())
        assert found == pytest.approx(ms(models[2], rows, roofline.bucket_of(1000 + rows)), rel=0.03)


@pytest.mark.parametrize("changes, forms, said", [
    ({"device": "NVIDIA H100"}, {"bfloat16"}, "was measured on NVIDIA H100, not on --gpu cpu"),
    ({"dtype": "float32"}, {"bfloat16"}, "with weights in float32; the forecast is for bfloat16"),
    ({"quantize": "int8"}, {"int8", "bfloat16"}, "in int8; the forecast is for bfloat16, int8"),
    ({"passes": []}, {"bfloat16"}, "no pass"),
    ({"passes": [{"rows": 1, "ms": 2.0, "read_bytes": 0, "layers": 2}]}, {"bfloat16"}, "no pass"),
    ({"passes": [{"rows": 1}]}, {"bfloat16"}, "doesn't end in"),
])  # fmt: skip
def test_a_calibration_that_does_not_fit_is_refused(tmp_path, changes, forms, said):
    passes = [{"rows": 1, "ms": 2.0, "read_bytes": 100, "layers": 2}]
    with pytest.raises(UserError, match=said):
        roofline.calibrated(CPU, bench_file(tmp_path, **{"passes": passes, **changes}), forms)


def test_two_models_of_one_ratio_say_nothing_about_layers(tmp_path):
    passes = [{"rows": 1, "ms": ms, "read_bytes": size, "layers": layers} for ms, size, layers in ((2.0, 100, 2), (2.1, 100, 2))]
    assert roofline.calibrated(CPU, bench_file(tmp_path, passes), {"bfloat16"}).kernel_us == CPU.kernel_us


@pytest.mark.parametrize("rule", ["judge", "judge:0.9"])
def test_a_measured_curve_is_continued(tmp_path, rule):
    file = tmp_path / "accept:1.json"
    file.write_text(json.dumps({"rules": {rule: {"mean_accepted": [0.8, 1.44, 1.952]}, "empty": {"mean_accepted": []}}}))
    curve = roofline.acceptance_curve(f"{file}:{rule}", 25)
    assert curve == pytest.approx([roofline.mean_accepted(0.8, m) for m in range(1, 65)])
    for other in ("empty", "topk"):
        with pytest.raises(UserError, match="FILE:RULE"):
            roofline.acceptance_curve(f"{file}:{other}", 25)


def test_sums_go_as_the_ranks_send_them():
    """One-shot, which reads every other rank's part, up to ``tp.SMALL_BYTES``; NCCL beyond."""
    m, h100 = roofline.model_of(shape("llama-3.1-405b"), 8, "int8"), roofline.GPUS["h100"]
    small, large = (roofline.collectives(m, h100, T) - 18e-6 for T in (32, 33))
    assert small == pytest.approx(253 * (9e-6 + 7 * 2 * 32 * 16384 / 450e9))
    assert large == pytest.approx(253 * (18e-6 + 7 / 8 * 2 * 2 * 33 * 16384 / 450e9))


def test_pytorchs_attention_reads_the_bucket():
    m, h100 = roofline.model_of(shape("llama-3.1-8b"), 1, "none"), roofline.replace(roofline.GPUS["h100"], attention="sdpa")
    a, b, c = (roofline.pass_terms(m, h100, 1, context)["attention"] for context in (1000, 1023, 1024))
    assert a == b == c / 2
    assert c == pytest.approx(1e3 * 2048 * m.position_bytes / (8 * 75e9))


def test_attention_is_divided_as_the_kernel_divides_it():
    """One key head of the 8B on 8 ranks: 22 parts of 96 keys, of which eleven hold a text of 1,025; four rows of 512 bytes each."""
    h100 = roofline.GPUS["h100"]
    m = roofline.model_of(shape("llama-3.1-8b"), 8, "int8")
    assert 96 in [plan.share(2048) for plan in roofline.plans_for(1, 4, 2048, 132)]
    found = roofline.pass_terms(m, h100, 1, 1024)["attention"]
    assert found == pytest.approx(1e3 * 32 * (96 * 512 / 75e9 + 1.5e-6 + 11 * 4 * 512 / 75e9))
    # a text that one part holds is exchanged with nobody
    assert roofline.pass_terms(m, h100, 1, 10)["attention"] == pytest.approx(1e3 * 32 * 11 * 512 / 75e9)
    # 416 rows of the 405B are 13 blocks, which all read the text, faster than memory could give it to them one by one
    m = roofline.model_of(shape("llama-3.1-405b"), 8, "int8")
    reading = 13 * 1050 * 512 / (0.85 * 3.35e12)
    found = roofline.pass_terms(m, h100, 26, 1024)["attention"]
    assert found == pytest.approx(1e3 * 126 * (reading + 1.5e-6 + 5 * 32 * 512 / 75e9))


@pytest.mark.parametrize("gpu", list(roofline.GPUS))
def test_attention_costs_more_behind_more_and_no_more_than_pytorchs(gpu):
    machine = roofline.GPUS[gpu]
    sdpa = roofline.replace(machine, attention="sdpa")
    for name, ranks in (("llama-3.1-8b", 1), ("llama-3.1-8b", 8), ("llama-3.1-405b", 8), ("qwen2.5-1.5b", 1)):
        m = roofline.model_of(shape(name), ranks, "int8")
        for T in (1, 26, 64):
            times = [roofline.attention_of(m, machine, T, context) for context in (500, 1000, 2000, 4000, 16000)]
            assert times == sorted(times)
            assert times[-1] <= roofline.attention_of(m, sdpa, T, 16000)
            assert T > 1 or times[1] < roofline.attention_of(m, sdpa, T, 1000)
            assert times[-1] >= m.position_bytes * 16000 / machine.bandwidth
        assert roofline.attention_of(m, machine, 65, 900) == roofline.attention_of(m, sdpa, 65, 900)  # the kernel takes no more


def test_a_quantized_checkpoint_is_forecast_as_it_is(tmp_path, monkeypatch):
    hf_model(tmp_path / "hf", "llama3")
    convert(tmp_path / "hf", tmp_path / "plain", torch.bfloat16)
    monkeypatch.setattr("sys.argv", ["quantize.py", "--checkpoint", str(tmp_path / "plain"), "--out", str(tmp_path / "int8")])
    quantize()
    plain, kept, made = (
        roofline.find_model(str(tmp_path / name), 1, mode, 100).bytes
        for name, mode in (("plain", "none"), ("int8", "none"), ("plain", "int8"))
    )
    assert kept == made < 0.7 * plain
    with pytest.raises(UserError, match="is int8 already"):
        roofline.find_model(str(tmp_path / "int8"), 1, "int4-g32", 100)
    with pytest.raises(UserError, match="--context is 600"):
        roofline.find_model(str(tmp_path / "int8"), 1, "none", 600)


def test_published_figures_are_near(capsys):
    rows = roofline.check_published()["published"]
    assert len(rows) == len(roofline.PUBLISHED) + len(roofline.JUDGED)
    for row in rows:
        if row.get("gpu") in ("h100", "h200") and row["ranks"] != 2 and "8b" in row["model"]:
            assert row["forecast"] / row["measured"] == pytest.approx(1, abs=0.15)
    assert capsys.readouterr().err.count("\n") == len(rows) + 2


@pytest.mark.parametrize("command, said", [
    (COMMAND.replace("19.7", "26"), "--acceptance is 26; a block of 25"),
    (COMMAND.replace("19.7", "no.json:judge"), "--acceptance is 'no.json:judge'; give m* as a number"),
    (COMMAND.replace("--acceptance 19.7", ""), "needs its m*"),
    (COMMAND.replace("--nproc 8", "--nproc 3"), "3 ranks"),
    (COMMAND.replace("405b", "406b"), "known shapes are"),
    ("--gpu cpu", "--gpu cpu needs"),
    ("--efficiency 1.5", "--efficiency is 1.5"),
    ("--kernel-us -1", "--kernel-us is -1"),
    ("--search", "--search needs a --draft"),
    ("--draft-tp 1", "--draft-tp needs a --draft"),
    ("--gpu cpu --bandwidth 30 --gflops 100 --nproc 2", "--nproc 2 has no meaning with --gpu cpu"),
    ("--calibrate x --efficiency 0.5", "--efficiency has no meaning with --calibrate"),
    ("--check --gpu h200", "--check takes no other options"),
    ("--calibrate nowhere.json", "--calibrate nowhere.json doesn't end"),
])  # fmt: skip
def test_mistakes_are_told(capsys, monkeypatch, command, said):
    with pytest.raises(UserError, match=said.replace("*", r"\*")):
        run(capsys, monkeypatch, command)
