"""Labels against naive reimplementations on tiny random models, and the files they are kept in."""

from __future__ import annotations

import argparse
import builtins
import functools
import json
import math
import sys

import compare_labels
import demo_task
import label
import pytest
import torch
from conftest import ROOT, tiny
from tasks import Problem

from errors import UserError
from judge import IGNORE, RIGHT, WRONG, read_labels
from tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(ROOT / "demo" / "target")
CAP = 24
PROBLEM = Problem(("any",), lambda text: len(text) % 4 != 0)
PROMPTS = [[1, 300 + i, 41 * i + 7, 55] for i in range(6)]


def miner(method, draft_vocab=640, **options):
    settings = {"method": method, "temperature": 0.0, "seed": 0, "given": False, "window": 5,
                "threshold": 3.0}  # fmt: skip
    target, draft = tiny(vocab_size=640), tiny(seed=1, vocab_size=draft_vocab, num_hidden_layers=2)
    return label.Miner(argparse.Namespace(**settings | options), target, draft, TOKENIZER, CAP, 64)


def next_token(model, ids):
    return int(model(torch.tensor([ids]))[0, -1].argmax())


def naive_answer(target, prompt, start):
    ids = list(start)
    while len(ids) < CAP:
        token = next_token(target, prompt + ids)
        if token in TOKENIZER.eos_ids:
            break
        ids.append(token)
    return ids


def test_mining_equals_the_naive_algorithm():
    found_labels = []
    for prompt in PROMPTS:
        m = miner("mine")
        found = m.mine(PROBLEM, prompt)
        answer = naive_answer(m.target, prompt, [])
        if not PROBLEM.is_right(TOKENIZER.decode(answer)):
            assert found.startswith("the target's own answer is wrong")
            continue
        harmless, matters, place = set(), [], 0
        while place < len(answer):
            token = next_token(m.draft, prompt + answer[:place])
            if token != answer[place]:
                other = naive_answer(m.target, prompt, answer[:place] + [token])
                if PROBLEM.is_right(TOKENIZER.decode(other)):
                    answer = other
                    harmless.add(place)
                else:
                    matters.append((place, token, WRONG))
            place += 1
        assert found.tokens == answer and found.alternatives == matters
        assert found.labels == [RIGHT if i in harmless else IGNORE for i in range(len(answer))]
        found_labels += [RIGHT] * len(harmless) + [WRONG] * len(matters)
    assert found_labels.count(RIGHT) > 10 and found_labels.count(WRONG) > 10


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_guesses_from_an_earlier_answer_change_nothing_but_the_passes(temperature, monkeypatch):
    m = miner("mine", temperature=temperature)
    calls, read = [], m.target_reader.read
    monkeypatch.setattr(m.target_reader, "read", lambda text: calls.append(text) or read(text))

    def finish(*args):
        calls.clear()
        return m.finish(PROBLEM, *args), len(calls)

    for prompt in PROMPTS:
        whole, _ = finish(prompt, [])
        assert finish(prompt, [], whole[0]) == (whole, 4)  # of 2, 4, 8 and 10 tokens
        for start in (whole[0][:4], [7, *whole[0][:3]]):
            slow, passes = finish(prompt, start)
            assert passes == CAP - len(start)
            for earlier in (slow[0], slow[0][3:], slow[0][:7] + [9, 9] + slow[0][7:], slow[0][:7] + slow[0][8:]):
                fast, passes = finish(prompt, start, earlier)
                assert fast == slow
            assert passes < CAP - len(start)  # the last lacks a token, and is found again behind it


def test_likelihood_equals_the_naive_sum():
    for prompt in PROMPTS[:3]:
        m = miner("likelihood")
        found = m.likelihood(PROBLEM, prompt)
        answer = naive_answer(m.target, prompt, [])

        def log_p(ids, start, model=m.target, prompt=prompt):
            p = model(torch.tensor([prompt + ids]))[0].log_softmax(-1)
            return sum(float(p[len(prompt) + i - 1, ids[i]]) for i in range(start, len(ids)))

        said = [next_token(m.draft, prompt + answer[:i]) for i in range(len(answer))]
        places = [i for i in range(len(answer)) if said[i] != answer[i]]
        assert found.tokens == answer and [(p, t) for p, t, _ in found.alternatives] == [(i, said[i]) for i in places]
        for (place, token, verdict), score in zip(found.alternatives, found.scores):
            rest = answer[place + 1 : place + 6]
            expected = log_p(answer[:place] + [token] + rest, place) - log_p(answer[:place] + [answer[place]] + rest, place)
            assert math.isclose(score, expected, abs_tol=1e-3)
            assert verdict == (RIGHT if score > -3 else WRONG)


@pytest.mark.parametrize("draft_vocab", [632, 648])
def test_a_draft_of_another_padding_is_no_hindrance(draft_vocab):
    for method in ("mine", "likelihood"):
        m = miner(method, draft_vocab)
        for prompt in PROMPTS:
            found = getattr(m, method)(PROBLEM._replace(is_right=lambda text: True), [*prompt, 639])
            assert all(0 <= token < 640 for token in [*found.tokens, *(token for _, token, _ in found.alternatives)])


def test_a_stop_token_is_part_of_what_is_judged(monkeypatch):
    easy = PROBLEM._replace(is_right=lambda text: True)
    whole = miner("mine").finish(PROBLEM, PROMPTS[0], [])[0]
    monkeypatch.setattr(TOKENIZER, "eos_ids", frozenset({whole[9]}))
    found = miner("mine").mine(easy, PROMPTS[0])
    own = miner("likelihood").likelihood(easy, PROMPTS[0])
    assert own.tokens == whole[: whole.index(whole[9]) + 1]
    assert all(token not in TOKENIZER.eos_ids for token in found.tokens[:-1])


def test_given_answers_are_labelled_in_place_of_the_targets_own():
    found = miner("likelihood", given=True).likelihood(PROBLEM._replace(given=" First we have 12."), PROMPTS[0])
    assert TOKENIZER.decode(found.tokens) == " First we have 12."


@pytest.fixture
def run(command):
    return functools.partial(command, "scripts/label.py")


def automatic(run, method, out, *more):
    return run(method, "--task", "demo-train", "--limit", "2", "--target", "demo/target", "--draft", "demo/draft", "--dtype",
               "float32", "--out", str(out), *more)  # fmt: skip


def own_questions(path, answers):
    """A file of questions like the demo's, with these answers (None: the right one)."""
    problems = demo_task.unseen_problems(len(answers))
    rows = [{"question": p.question, "answer": answer or str(p.answer)} for p, answer in zip(problems, answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_ones_own_questions_are_labelled(tmp_path, run):
    data, out = own_questions(tmp_path / "mine.jsonl", [None]), tmp_path / "labels.jsonl"
    done = run("likelihood", "--task", "qa", "--data", data, "--out", str(out))
    assert done.returncode == 0 and done.stderr.startswith(f"1 questions of {data}\n"), done.stderr
    assert {example.question for example in read_labels(out, TOKENIZER)} == {0}


def test_no_label_at_all_is_a_mistake_that_says_what_to_do(tmp_path, run):
    data = own_questions(tmp_path / "mine.jsonl", ["-7"])
    done = run("mine", "--task", "qa", "--data", data, "--out", str(tmp_path / "labels.jsonl"))
    assert done.returncode == 2 and "1 skipped as the target's own answer is wrong" in done.stdout
    assert "labels.jsonl holds no label: give questions that the target can answer" in done.stderr.splitlines()[-1]


def test_gsm8ks_examples_and_the_reasons_for_what_is_skipped_are_told(tmp_path, monkeypatch, capsys):
    data, reasons = tmp_path / "d.jsonl", iter(["wrong", "empty", "wrong"])
    data.write_text((json.dumps({"question": "1+1?", "answer": "#### 2"}) + "\n") * 7)
    monkeypatch.setattr(label.Miner, "mine", lambda *args: next(reasons))
    argv = ["label.py", "mine", "--task", "gsm8k", "--data", str(data), "--out", str(tmp_path / "labels.jsonl")]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(UserError, match="holds no label: give questions that the target can answer"):
        label.main()
    out, err = capsys.readouterr()
    assert out == "0 labels (0 right, 0 wrong) from 3 questions; 2 skipped as wrong; 1 skipped as empty\n"
    assert f"3 questions of {data}; its last 4 rows are worked examples before each question, and not asked\n" in err
    monkeypatch.setattr(sys, "argv", ["label.py", "mine", "--help"])
    with pytest.raises(SystemExit):
        label.main()
    assert "gsm8k's last 4 rows are worked examples, not asked" in " ".join(capsys.readouterr().out.split())


def test_answers_that_the_draft_would_give_too_are_told():
    rows = [{"labels": [IGNORE], "alternatives": []}, {"labels": [IGNORE], "alternatives": [[0, 5, WRONG]]}]
    assert label.summary(rows, 0, 0) == "1 labels (0 right, 1 wrong) from 2 questions; in 1 the draft would say the same throughout"


def test_an_interrupted_run_goes_on_and_gives_the_same_file(tmp_path, run):
    out = tmp_path / "labels.jsonl"
    done = automatic(run, "likelihood", out, "--html", str(tmp_path / "page.html"))
    assert done.returncode == 0 and "an hour" in done.stdout, done.stderr
    whole = out.read_text()
    assert len(whole.splitlines()) == 2 and "Labelled answers" in (tmp_path / "page.html").read_text()
    out.write_text(whole[: whole.index("\n") + 40])  # killed while it wrote the second line
    assert automatic(run, "likelihood", out).returncode == 0
    assert out.read_text() == whole
    assert {label for example in read_labels(out, TOKENIZER) for label in example.labels} == {RIGHT, WRONG, IGNORE}
    refused = automatic(run, "likelihood", out, "--threshold", "5")
    assert refused.returncode == 2 and "made otherwise" in refused.stderr and out.read_text() == whole


@pytest.mark.parametrize("argv, words", [
    (("mine", "--task", "mt-bench", "--data", "CHAT", "--target", "demo/target", "--draft", "demo/draft"), "can't be mined"),
    (("likelihood", "--task", "mt-bench", "--data", "CHAT", "--given", "--target", "demo/target", "--draft", "demo/draft"),
     "no given answers"),
    (("mine", "--task", "gsm8k", "--target", "demo/target", "--draft", "demo/draft"), "needs --data"),
    (("likelihood", "--task", "demo", "--target", "demo/target", "--draft", "demo/draft", "--window", "0"), "--window is 0"),
    (("manual", "nothing.jsonl", "--target", "demo/target"), "nothing.jsonl can't be read"),
])  # fmt: skip
def test_mistakes_are_told_in_one_line(tmp_path, run, argv, words):
    (tmp_path / "chat.jsonl").write_text('{"question_id": 1, "turns": ["Hello"]}')
    argv = [str(tmp_path / "chat.jsonl") if arg == "CHAT" else arg for arg in argv]
    done = run(*argv, "--out", str(tmp_path / "x.jsonl"))
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "x.jsonl").exists()


def test_labels_by_hand_with_a_step_back(tmp_path, monkeypatch, capsys):
    data, out = tmp_path / "data.jsonl", tmp_path / "labels.jsonl"
    pair = {"question": "q", "correct": " it is 4", "wrong": " it is 5", "mistake": [7, 8]}
    rows = [{"question": "a", "answer": " one 12 three"}, pair, {"question": "b", "answer": " four five"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(
        sys, "argv", ["label.py", "manual", str(data), "--target", str(ROOT / "demo" / "target"), "--out", str(out)]
    )

    def type_in(*lines):
        typed = iter(lines)
        monkeypatch.setattr(builtins, "input", lambda prompt: next(typed))
        label.main()
        return [json.loads(line) for line in out.read_text().splitlines()]

    # a wrong span, a span, then (the tuple needs no question) back from the last to the first, which turns out to be right
    (first, right, wrong) = type_in("7-9", "b", "2", "b", "", "q")
    assert "is no span of the words 1 to 3" in capsys.readouterr().out
    assert set(first["labels"]) == set(right["labels"]) == {RIGHT} and first["tokens"][-1] in TOKENIZER.eos_ids
    assert wrong["labels"][-1] == WRONG and wrong["answer"] == " it is 5"
    last = type_in("2")[-1]  # goes on where it stopped
    assert last["question"] == "b" and WRONG in last["labels"] and last["labels"][0] == RIGHT
    assert [e.question for e in read_labels(out, TOKENIZER)] == [0, 1, 1, 2]
    before = out.read_bytes()
    data.write_text(data.read_text().replace('"b"', '"c"'))
    with pytest.raises(UserError, match="other questions"):  # a file of the same name, with other questions
        label.main()
    with pytest.raises(UserError, match="made otherwise"):
        monkeypatch.setattr(sys, "argv", [*sys.argv, "--labels-after", "rest"])
        label.main()
    assert out.read_bytes() == before
    with pytest.raises(UserError, match="labelled by the rule 'span'"):
        read_labels(out, TOKENIZER, "rest")


def test_labels_of_the_same_token_at_the_same_place_are_compared(tmp_path):
    row = {"question": "q", "tokens": [5, 6, 7], "labels": [IGNORE, RIGHT, IGNORE], "alternatives": [[2, 9, WRONG], [2, 8, WRONG]]}
    other = {**row, "alternatives": [[2, 9, RIGHT], [1, 8, WRONG]]}
    for name, rows in (("one", [row, {"question": "r", "skipped": "why"}]), ("two", [other])):
        (tmp_path / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    one, two = (compare_labels.labels_of(tmp_path / name) for name in ("one", "two"))
    assert one == {("q", (5, 6)): RIGHT, ("q", (5, 6, 9)): WRONG, ("q", (5, 6, 8)): WRONG}
    assert {place for place in one if place in two} == {("q", (5, 6)), ("q", (5, 6, 9))}
    assert compare_labels.kappa([(RIGHT, RIGHT), (WRONG, WRONG)]) == 1
    assert compare_labels.kappa([(RIGHT, RIGHT), (WRONG, RIGHT), (RIGHT, WRONG), (WRONG, WRONG)]) == 0
