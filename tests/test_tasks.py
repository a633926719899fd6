"""Tasks: what is asked, when an answer is right, and that generated code is run where it can do no harm."""

from __future__ import annotations

import json
import subprocess
import sys

import demo_task
import pytest
import sandbox
import tasks
from conftest import ROOT

from errors import UserError
from tokenizer import load_tokenizer


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("text, number", [
    ("so 3+4=7\n#### 7", "7"), ("#### $1,234.00", "1234"), ("#### -5 apples", "-5"), ("no mark 7", None), ("#### 0.5", "0.5"),
    ("#### 18.0", "18"), ("#### 100", "100"),
])  # fmt: skip
def test_final_number(text, number):
    assert tasks.final_number(text) == number


def test_gsm8k_asks_behind_worked_examples(tmp_path):
    rows = [{"question": f"q{i}?", "answer": f"1+{i}=<<1+{i}={1 + i}>>{1 + i}\n#### {1 + i}"} for i in range(7)]
    problems = tasks.read_problems("gsm8k", write(tmp_path / "d.jsonl", rows), 10)
    assert len(problems) == 3  # the last four are the worked examples
    first = problems[0]
    assert first.turns[0].startswith("Question: q3?\nAnswer: 1+3=4\n#### 4\n\nQuestion: q4?") and first.turns[0].endswith(
        "q0?\nAnswer:"
    )
    assert first.is_right(" it is\n#### 1") and not first.is_right("#### 2") and not first.is_right("1")
    assert first.given == " 1+0=1\n#### 1"


def test_gsm8k_needs_more_rows_than_its_examples(tmp_path):
    rows = [{"question": "q?", "answer": "#### 1"}] * 4
    with pytest.raises(UserError, match="has 4 rows; gsm8k takes the last 4 as worked examples, so it needs more .--task qa"):
        tasks.read_problems("gsm8k", write(tmp_path / "d.jsonl", rows), 10)


@pytest.mark.parametrize("wanted, text, right", [
    ("12", "5 + 7 = 12.", True), ("12", "12, not 13", False), ("12", "no number", False), ("1,200.0", "That is $1200.", True),
    ("12%", "it is 12 %", True), ("-3", "so -3", True), ("5+7 = 12\n#### 12", "#### 12 (of 20)", True), ("12", "112", False),
    ("Paris", "The capital is **Paris**.", True), ("The Nile", "It's the nile, of course", True), ("Paris", "Parisian", False),
    ("two of them", "Of them, two", False), ("Straße", "STRASSE", True), ("Apollo 11", "Apollo 11 in 1969", True),
])  # fmt: skip
def test_ones_own_questions_are_checked_by_the_number_or_the_words(tmp_path, wanted, text, right):
    (problem,) = tasks.read_problems("qa", write(tmp_path / "d.jsonl", [{"question": "q?", "answer": wanted}]), 10)
    assert problem.turns == ("q?",) and problem.given == wanted and problem.is_right(text) is right


@pytest.mark.parametrize("text, letter", [
    ("so the answer is B.", "B"), ("The answer is **(C)**", "C"), (" D", "D"), ("(A).", "A"), ("A cat", None), ("", None),
    ("the answer is a cat. The answer is: E", "E"), ("The answer is B. No: the answer is C.", "C"),
])  # fmt: skip
def test_the_chosen_letter(text, letter):
    assert tasks.chosen(text) == letter


@pytest.mark.parametrize("row", [
    {"question": "q", "choices": ["x", "y", "z"], "answer": 1}, {"question": "q", "choices": ["x", "y", "z"], "answer": "B"},
    {"question": "q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"},
])  # fmt: skip
def test_choices_in_both_forms(tmp_path, row):
    (problem,) = tasks.read_problems("arc", write(tmp_path / "d.jsonl", [row]), 5)
    assert "A. x\nB. y" in problem.turns[0] and problem.is_right("The answer is B.") and not problem.is_right("The answer is A.")


@pytest.mark.parametrize("task, row, words", [
    ("mmlu", {"question": "q", "choices": ["x"], "answer": 0}, "line 1: there must be 2"),
    ("mmlu", {"question": "q", "choices": ["x", "y"], "answer": 5}, "line 1: the answer 5"),
    ("arc", {"question": "q", "choices": ["x", "y"], "answer": "Q"}, "line 1"), ("mmlu", {"question": "q"}, "line 1: no 'choices'"),
    ("gsm8k", {"question": "q", "answer": 3}, "line 1: question and answer"), ("gsm8k", {"question": "q"}, "line 1: no 'answer'"),
    ("gsm8k", {"question": "q", "answer": "it is 3"}, "line 1: the answer must end with #### and a number.*--task qa"),
    ("qa", {"question": "q", "answer": ""}, "line 1: the answer is empty"),
    ("humaneval", {"prompt": "x"}, "line 1: no 'test'"), ("mt-bench", {"question_id": 1, "turns": []}, "line 1: turns"),
])  # fmt: skip
def test_a_bad_line_is_refused_with_its_number(tmp_path, task, row, words):
    with pytest.raises(UserError, match=words):
        tasks.read_problems(task, write(tmp_path / "d.jsonl", [row]), 5)


def test_data_that_is_missing_is_asked_for():
    with pytest.raises(UserError, match="--data FILE"):
        tasks.read_problems("gsm8k", None, 5)
    with pytest.raises(UserError, match="--limit is 0"):
        tasks.read_problems("demo", None, 0)


def test_a_second_turn_follows_the_first_answer(tmp_path):
    (problem,) = tasks.read_problems("mt-bench", write(tmp_path / "d.jsonl", [{"question_id": 81, "turns": ["Hi.", "Again."]}]), 5)
    tokenizer = load_tokenizer(ROOT / "demo" / "target")
    first, second = tasks.encode(tokenizer, problem, "mt-bench"), tasks.encode(tokenizer, problem, "mt-bench", ("Yes.",))
    assert problem.is_right is None and problem.id == 81
    assert tokenizer.decode(first).count("Question:") == 1 and second[: len(first)] == first
    assert "Yes." in tokenizer.decode(second) and tokenizer.decode(second).count("Question:") == 2


def test_labels_are_made_on_other_problems_than_the_evaluation():
    unseen = {p.question for p in demo_task.unseen_problems(1000)}
    assert not unseen & {p.turns[0] for p in tasks.read_problems("demo-train", None, 200)}


def test_generated_code_is_judged_by_its_tests(tmp_path):
    row = {"prompt": "def add(a, b):\n", "test": "def check(f):\n    assert f(2, 3) == 5", "entry_point": "add", "task_id": "x/1"}
    (problem,) = tasks.read_problems("humaneval", write(tmp_path / "d.jsonl", [row]), 5)
    assert (
        problem.is_right("    return a + b\n")
        and not problem.is_right("    return a - b\n")
        and not problem.is_right("    return (")
    )


@pytest.mark.parametrize("program, ends_well", [
    ("print('fine')", True), ("raise SystemExit(125)", False), ("import os; os._exit(0)", False),
    ("exit(0)", False), ("while True: pass", False), ("import time; time.sleep(60)", False),
    ("bytearray(3 << 30)", False), ("open('big', 'wb').write(bytes(2 << 20))", False),
    ("import socket; socket.create_connection(('127.0.0.1', 9), 1)", False),
])  # fmt: skip
def test_a_program_is_run_within_limits(program, ends_well):
    assert sandbox.runs(program, seconds=1) is ends_well


def test_limits_that_are_lower_already_stay(tmp_path):
    lower = "from resource import *; setrlimit(RLIMIT_CPU, (5, 5)); setrlimit(RLIMIT_FSIZE, (9999, 9999))"
    code = f"{lower}\nimport sandbox\nprint(sandbox.runs('print(1)'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "scripts")
    assert done.stdout == "True\n", done.stderr


def test_a_program_has_no_network_not_even_its_own():
    here = "import socket\nserver = socket.socket()\nserver.bind(('127.0.0.1', 0))\nserver.listen()\n"
    assert not sandbox.runs(here + "socket.create_connection(server.getsockname(), 1)", seconds=3)


def test_what_a_program_starts_ends_with_it(tmp_path):
    mark = tmp_path / "alive"
    child = f"import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(2)\n    open({str(mark)!r}, 'w').write('x')\n"
    assert sandbox.runs(child, seconds=1)
    import time

    time.sleep(2.5)
    assert not mark.exists()


def test_without_namespaces_nothing_is_run(monkeypatch, tmp_path):
    fake = tmp_path / "sandbox.py"
    fake.write_text("import sys; sys.exit('unshare: Operation not permitted')")
    monkeypatch.setattr(sandbox, "__file__", str(fake))
    with pytest.raises(UserError, match="cut off from the network.*not permitted"):
        sandbox.runs("print(1)")


def test_a_file_that_a_task_would_not_read_is_refused(tmp_path):
    for task in ("demo", "demo-train"):
        with pytest.raises(UserError, match="makes its own questions; it takes no file"):
            tasks.read_problems(task, tmp_path / "mine.jsonl", 2)
