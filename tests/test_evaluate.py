"""The evaluation's bookkeeping: rules, answers, statistics, resuming; and tuples with planted mistakes."""

from __future__ import annotations

import dataclasses
import json
import random

import evaluate
import plant_mistakes
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import judge
from errors import UserError

HEAD = judge.Head(torch.zeros(4), 0.0, "post_norm", "any", "", threshold=0.4)


def test_rules_are_parsed_and_refused_by_name():
    got = evaluate.parse_rules("plain,draft,standard,judge,judge:0.9,topk:3,kl", {"a": HEAD})
    assert [(c.verify, c.threshold) for c in got] == [
        ("standard", 0.0), ("standard", 0.0), ("standard", 0.0), ("judge", 0.4), ("judge", 0.9), ("topk", 3.0), ("kl", 0.3),
    ]  # fmt: skip
    several = evaluate.parse_rules("plain,judge:0.9", {"a": HEAD, "b": HEAD})
    assert [c.name for c in several] == ["plain", "judge:0.9[a]", "judge:0.9[b]"]
    lengths = evaluate.parse_rules("plain,standard,standard@25,judge:0.9@12,kl", {"a": HEAD})
    assert [c.draft_len for c in lengths] == [0, 8, 25, 12, 25] and lengths[3].threshold == 0.9
    assert [c.draft_len for c in evaluate.parse_rules("draft,standard,standard@25,kl", {}, draft_len=4)] == [0, 4, 25, 4]
    for bad, words in (
        ("magic", "'magic'"), ("plain:3", "'plain:3'"), ("topk:x", "must be a number"), ("judge:2", "δ"), ("kl,plain,kl", "twice"),
        ("plain@3", "drafts nothing"), ("draft@3", "drafts nothing"), ("standard@0", "@M"), ("judge@x", "@M"), ("kl@", "@M"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            evaluate.parse_rules(bad, {"a": HEAD})
    with pytest.raises(UserError, match="--judge FILE"):
        evaluate.parse_rules("plain,judge", {})


def test_statistics_by_hand():
    low, high = evaluate.wilson(50, 100)
    assert abs(low - 0.4038) < 1e-3 and abs(high - 0.5962) < 1e-3
    assert evaluate.mcnemar(0, 0) == 1.0 and evaluate.mcnemar(5, 5) == 1.0
    assert abs(evaluate.mcnemar(1, 7) - 2 * 9 / 256) < 1e-12
    result = {"right": True, "new_tokens": 6, "rounds": 2, "accepted": 4, "by_rule": 1, "decode_s": 2.0,
              "ms": {"draft": 1.0, "verify": 2.0, "other": 1.0}}  # fmt: skip
    row = evaluate.row_of([result, {**result, "right": False}], [result, result])
    assert (row["accuracy"], row["delta_vs_plain"], row["mean_accepted"], row["tokens_per_round"]) == (0.5, -0.5, 2.0, 3.0)
    assert (row["tokens_per_s"], row["other_share"]) == (3.0, 0.25)


def test_an_interrupted_run_goes_on_and_another_runs_file_is_refused(tmp_path):
    out = tmp_path / "answers.jsonl"
    signature = {"task": "demo"}
    assert evaluate.read_done(out, signature) == {}
    row = {"rule": "plain", "problem": 0, "right": True}
    out.write_text(out.read_text() + json.dumps(row) + "\n" + json.dumps(row)[:9])
    assert evaluate.read_done(out, signature) == {("plain", 0): row}
    assert out.read_text().endswith("}\n")
    with pytest.raises(UserError, match="another run"):
        evaluate.read_done(out, {"task": "gsm8k"})


def test_answers_belong_to_what_decided_them_not_to_a_name():
    other = dataclasses.replace(HEAD, bias=1.0)

    def names(draft_len):
        rules = "plain,draft,standard,judge,judge:0.9,topk:5"
        return [evaluate.identity(c) for c in evaluate.parse_rules(rules, {"a": HEAD, "b": other, "c": HEAD}, draft_len)]

    usual, short = names(None), names(4)
    assert len(set(usual)) == 8 and usual[3] == usual[5]  # a and c are one head
    assert not set(usual[2:]) & set(short[2:])
    assert usual[:2] == short[:2]  # these draft nothing


@given(st.integers(1, 3000), st.data())
def test_an_interval_holds_its_share(n, data):
    right = data.draw(st.sampled_from([0, 1, n - 1, n]) | st.integers(0, n))
    low, high = evaluate.wilson(right, n)
    assert 0 <= low <= right / n <= high <= 1


@given(st.integers(0, 10_000), st.lists(st.integers(0, 99_999), min_size=1, max_size=4))
def test_a_planted_mistake_lies_where_it_says(seed, numbers):
    answer = " ".join(f"{n}+0 = {n} things." for n in numbers)
    wrong, (start, end) = plant_mistakes.plant(answer, random.Random(seed))
    assert len(wrong) == len(answer) and wrong != answer
    assert wrong[:start] == answer[:start] and wrong[end:] == answer[end:]
    assert wrong[start] != answer[start] and wrong[start:end].isdigit()
    assert plant_mistakes.plant("nothing computed", random.Random(seed)) is None
