"""The forecast of a round: its sums, what it makes of measurements, and the published figures it is held against."""

from __future__ import annotations

import json

import pytest
import roofline
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import shape

from errors import UserError

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
    assert said["bound_tokens_per_s"] > said["tokens_per_s"] > 250


def test_a_draft_on_every_rank_has_no_collectives(capsys, monkeypatch):
    said = run(capsys, monkeypatch, COMMAND + " --draft-tp 1")
    assert said["terms"]["draft"]["collectives"] == 0 < said["terms"]["verify"]["collectives"]
    assert said["terms"]["draft"]["bytes"] > 7 * run(capsys, monkeypatch, COMMAND)["terms"]["draft"]["bytes"]


def test_the_search_is_no_worse_than_any_length(capsys, monkeypatch):
    best = run(capsys, monkeypatch, COMMAND + " --search")["tokens_per_s"]
    for M in (1, 5, 16, 25, 40):
        accepted = roofline.acceptance_curve("19.7", 25)[M - 1]
        command = COMMAND.replace("25", str(M)).replace("19.7", str(accepted))
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
    assert whole.kv_bytes == 2 * 2 * 32 * 8 * 128
    assert roofline.model_of(shape("llama-3.1-8b"), 8, "none").bytes == pytest.approx(whole.bytes / 8, rel=0.001)


@given(st.floats(0.01, 0.99), st.integers(1, 64))
def test_a_chance_is_found_again_from_its_mean(chance, M):
    assert roofline.chance_for(roofline.mean_accepted(chance, M), M) == pytest.approx(chance, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-11, 1e-9), st.floats(0.5, 200), st.floats(1, 20))
def test_calibration_finds_the_machine_again(tmp_path_factory, per_byte, kernel_us, slope):
    """Passes of two models on a made-up machine; a third model's are then forecast exactly."""

    def ms(model, rows):
        kernels = roofline.KERNELS_A_LAYER * model.layers * kernel_us * 1e-6
        return 1e3 * (kernels + model.bytes * per_byte * (1 + slope * (rows - 1)))

    models = [roofline.model_of(shape(name), 1, "none") for name in ("qwen2.5-0.5b", "qwen2.5-1.5b", "llama-3.2-1b")]
    passes = [{"rows": rows, "ms": ms(m, rows), "bytes": m.bytes, "layers": m.layers} for m in models[:2] for rows in (1, 26)]
    file = tmp_path_factory.mktemp("bench") / "bench.json"
    file.write_text("a table\n" + json.dumps({"passes": passes}))
    machine = roofline.calibrated(roofline.Machine("cpu", 3e10, 1e11, cpu=True), file)
    for rows in (1, 10, 26):
        found = sum(roofline.pass_terms(models[2], machine, rows, 0).values())
        assert found == pytest.approx(ms(models[2], rows), rel=0.02)


def test_a_measured_curve_is_continued(tmp_path):
    file = tmp_path / "accept.json"
    file.write_text('{"rules": {"judge": {"mean_accepted": [0.8, 1.44, 1.952]}}}')
    curve = roofline.acceptance_curve(f"{file}:judge", 25)
    assert curve == pytest.approx([roofline.mean_accepted(0.8, m) for m in range(1, 65)])


def test_published_figures_are_near(capsys):
    rows = roofline.check_published()["published"]
    assert len(rows) == len(roofline.PUBLISHED) + 1
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
    ("--calibrate nowhere.json", "--calibrate nowhere.json doesn't end"),
])  # fmt: skip
def test_mistakes_are_told(capsys, monkeypatch, command, said):
    with pytest.raises(UserError, match=said.replace("*", r"\*")):
        run(capsys, monkeypatch, command)
