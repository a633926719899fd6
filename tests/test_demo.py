"""The shipped demo pair does what the README says it does, on a few of its problems, through the commands themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import demo_task
import pytest
import torch
from conftest import ROOT

import checkpoint
import demo
import generate
import judge
import llm


def started(*argv):
    """Standard output of a command run in the project's folder."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # on so small a model a second thread only waits for the first
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_generate_without_arguments_runs_judge_decoding_on_the_demo_pair():
    result = json.loads(started("generate.py", "--no-compile", "--json").splitlines()[-1])
    assert result["finish_reason"] == "stop" and result["config"]["verify"] == "judge"
    assert result["accepted_by"]["judge"] > 5 and result["mean_accepted"] > 5


def test_a_head_belongs_to_its_model():
    head = judge.load_head(llm.DEMO / "judge.pt")
    head.check(checkpoint.fingerprint(llm.DEMO / "target"), head.weight.numel(), "demo")
    shipped = [path for path in llm.DEMO.rglob("*") if path.suffix != ".states"]  # which train_judge.py keeps beside its labels
    assert sum(path.stat().st_size for path in shipped) < 10 << 20


def test_the_draft_costs_an_eighth_of_the_target():
    target, draft = (checkpoint.load_model(llm.DEMO / name, torch.bfloat16) for name in ("target", "draft"))
    assert target.weight_bytes() >= 8 * draft.weight_bytes()


@pytest.fixture(scope="module")
def table():
    out = started("scripts/evaluate.py", "--limit", "25", "--rules", "plain,draft,standard,judge,topk:5", "--dtype", "float32",
                  "--no-compile", "--json")  # fmt: skip
    result = json.loads(out.splitlines()[-1])
    assert result["task"] == "demo" and result["n"] == 25
    return result["rules"]


def test_the_judge_keeps_the_targets_answers_at_three_times_the_accepted_tokens(table):
    assert table["plain"]["accuracy"] >= 0.9
    assert 0.3 <= table["draft"]["accuracy"] <= 0.8
    assert table["standard"]["accuracy"] == table["plain"]["accuracy"] and table["standard"]["delta_vs_plain"] == 0
    assert table["judge"]["accuracy"] >= table["plain"]["accuracy"] - 0.05
    assert table["judge"]["mean_accepted"] >= 3 * table["standard"]["mean_accepted"]
    assert table["topk:5"]["accuracy"] < table["judge"]["accuracy"] - 0.1


def test_what_two_names_stand_for_is_answered_once(tmp_path):
    out = started("scripts/evaluate.py", "--limit", "2", "--rules", "standard,standard@8,standard@3", "--no-compile", "--json",
                  "--out", str(tmp_path / "a.jsonl"))  # fmt: skip
    rules = json.loads(out.splitlines()[-1])["rules"]
    assert rules["standard"] == rules["standard@8"] and rules["standard"]["mean_accepted"] > rules["standard@3"]["mean_accepted"]
    _, *rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [row["rule"] for row in rows] == 2 * ["standard 0.0 M=8", "standard 0.0 M=3"]


def test_the_lossless_check_passes_on_the_demo_pair(command):
    argv = ("--prompts", "2", "--draft-lens", "1,7", "--new-tokens", "40", "--self-tokens", "60")
    out = command("scripts/check_lossless.py", *argv).stdout
    assert "8 texts of 40 tokens compared with plain decoding, 0 differ" in out


def test_the_demo_script_shows_the_table(command):
    out = command("scripts/demo.py", "--repeats", "1", "--no-compile").stdout
    assert out.startswith("question: ") and "judge" in out.splitlines()[-1] and "\033" not in out  # which is for terminals


def test_the_demo_script_colours_tokens_on_a_terminal(monkeypatch):
    run = SimpleNamespace(output=SimpleNamespace(text="ab", ends=[1, 2], accepted_by=[generate.RULE, generate.TARGET]))
    assert demo.coloured(run) == "ab"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    rule, target = generate.COLOURS[generate.RULE], generate.COLOURS[generate.TARGET]
    assert demo.coloured(run) == f"{rule}a{generate.RESET}{target}b{generate.RESET}"


def test_a_head_is_trained_from_tuples(tmp_path, command):
    lines = []
    for problem in demo_task.unseen_problems(30):
        wrong = f" The answer is {problem.answer + 1} {problem.item}."
        lines.append(json.dumps({
            "question": problem.question, "correct": f" The answer is {problem.answer} {problem.item}.", "wrong": wrong,
            "mistake": [15, 15 + len(str(problem.answer + 1))],
        }))  # fmt: skip
    (tmp_path / "tuples.jsonl").write_text("\n".join(lines))
    out = command("scripts/train_judge.py", str(tmp_path / "tuples.jsonl"), "--target", "demo/target", "--out",
                  str(tmp_path / "head.pt"), "--kind", "pre_norm", "--dtype", "float32").stdout  # fmt: skip
    assert "AUC" in out and "chosen" in out
    head = judge.load_head(tmp_path / "head.pt")
    assert head.kind == "pre_norm" and head.fingerprint == checkpoint.fingerprint(llm.DEMO / "target")
