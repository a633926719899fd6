"""The tasks that labels, evaluation and acceptance are made on: where problems come from, and when an answer is right.

A new task is a function from a data file to problems, and a line in ``TASKS``.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
import re
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import demo_task
import sandbox

from errors import UserError
from files import read_jsonl
from tokenizer import Tokenizer
from tp import same, together

NUMBER = r"-?[\d,]*\.?\d+"
SHOTS = 4  # worked examples in front of a GSM8K question, from the end of the data file
LETTERS = "ABCDEFGHIJ"


class Problem(NamedTuple):
    """What is asked. ``turns`` are the user's, one but for MT-Bench."""

    turns: tuple[str, ...]
    is_right: Callable[[str], bool] | None  # of the last answer; None where no program can tell
    stop: tuple[str, ...] = ()
    given: str | None = None  # a right answer, where the data has one
    id: Any = None  # the data's own, where it has one


class Task(NamedTuple):
    """A kind of problem. ``problems`` takes the data file and how many are wanted."""

    problems: Callable[[Path, int], list[Problem]]
    cap: int  # new tokens an answer may have
    raw: bool = False  # the prompt is a whole text, not to be put into the chat template
    needs_data: bool = True
    note: str = ""  # what is done with the data file beyond asking its questions


def demo_problem(problem: demo_task.Problem) -> Problem:
    """A problem of the demo task, and a right answer in a mixture of its wordings."""
    given = demo_task.to_text(demo_task.write_solution(problem, random.Random(problem.question), (1, 1, 1)))
    return Problem((problem.question,), lambda text: demo_task.is_right(problem, text), given=given)


def demo_problems(data: Path, limit: int) -> list[Problem]:
    """The demo task's unseen problems."""
    return [demo_problem(p) for p in demo_task.unseen_problems(limit)]


def demo_training_problems(data: Path, limit: int) -> list[Problem]:
    """Problems of the demo task to make labels from, none of them among the unseen ones."""
    unseen = frozenset(p.question for p in demo_task.unseen_problems(1000))
    stream = demo_task.training_problems(random.Random("labels"), unseen)
    return [demo_problem(p) for p in itertools.islice(stream, limit)]


def question_and_answer(row: Any) -> dict[str, str]:
    """A row with the texts ``question`` and ``answer``, checked."""
    if not isinstance(row["question"], str) or not isinstance(row["answer"], str):
        raise ValueError("question and answer must be text")
    return row


def final_number(text: str) -> str | None:
    """What a GSM8K answer ends with: the number after ####, or None."""
    match = re.search(rf"####\s*\$?({NUMBER})", text)
    return plain_number(match.group(1)) if match else None


def plain_number(text: str) -> str:
    """A number as it is compared: without thousands' commas and needless zeros."""
    return f"{Decimal(text.replace(',', '')).normalize():f}"


def without_marks(answer: str) -> str:
    """A GSM8K answer without its calculator marks <<...>>."""
    return re.sub(r"<<.*?>>", "", answer)


def gsm8k_prompt(question: str, shots: list[dict[str, Any]]) -> str:
    """The question behind worked examples."""
    worked = [f"Question: {row['question']}\nAnswer: {without_marks(row['answer'])}\n\n" for row in shots]
    return "".join(worked) + f"Question: {question}\nAnswer:"


def gsm8k_problems(data: Path, limit: int) -> list[Problem]:
    """GSM8K with the last SHOTS rows of the file as worked examples (they are not asked)."""

    def parse(row: Any) -> dict[str, str]:
        if final_number(question_and_answer(row)["answer"]) is None:
            raise ValueError("the answer must end with #### and a number, as GSM8K's do; --task qa takes other answers")
        return row

    rows = read_jsonl(data, parse)
    if len(rows) <= SHOTS:
        raise UserError(
            f"{data} has {len(rows)} rows; gsm8k takes the last {SHOTS} as worked examples, so it needs more (--task qa needs none)"
        )

    return [
        Problem(
            (gsm8k_prompt(row["question"], rows[-SHOTS:]),),
            functools.partial(ends_with, final_number(row["answer"])),
            ("\n\n", "Question:"),
            " " + without_marks(row["answer"]),
        )
        for row in rows[:-SHOTS][:limit]
    ]


def ends_with(number: str | None, text: str) -> bool:
    """Whether it is the number a GSM8K answer ends with."""
    return final_number(text) == number


def qa_problems(data: Path, limit: int) -> list[Problem]:
    """One's own questions, asked as they are: rows of question and answer."""

    def parse(row: Any) -> Problem:
        answer = question_and_answer(row)["answer"]
        if not words(answer):
            raise ValueError("the answer is empty")
        return Problem((row["question"],), lambda text: answers(text, answer), given=answer)

    return read_jsonl(data, parse)[:limit]


def answers(text: str, wanted: str) -> bool:
    """Whether a text gives the wanted answer.

    Where that is a number, or ends with #### and one: whether it is the text's last number (the one after ####, if it has that).
    Else: whether its words stand in the text one after the other, capitals, punctuation, "a", "an" and "the" aside. So a text that
    denies the answer passes too: ask for short ones.
    """
    alone = re.fullmatch(rf"\s*\$?({NUMBER})\s*[.%]?\s*", wanted)
    number = plain_number(alone.group(1)) if alone else final_number(wanted)
    if number is None:
        return f" {words(wanted)} " in f" {words(text)} "
    said = re.findall(NUMBER, text)
    return (final_number(text) or (plain_number(said[-1]) if said else None)) == number


def words(text: str) -> str:
    """A text's words as they are compared, a space between two."""
    return " ".join(word for word in re.findall(r"\w+", text.casefold()) if word not in ("a", "an", "the"))


def humaneval_problems(data: Path, limit: int) -> list[Problem]:
    """HumanEval: a function's head is completed, and its tests are run in a process of their own."""

    def parse(row: Any) -> Problem:
        prompt, test, name = row["prompt"], row["test"], row["entry_point"]
        if not all(isinstance(text, str) for text in (prompt, test, name)):
            raise ValueError("prompt, test and entry_point must be text")
        stop = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n```", "\nassert ")
        passes = lambda text: sandbox.runs(f"{prompt}{text}\n{test}\ncheck({name})\n")  # noqa: E731
        return Problem((prompt,), passes, stop, row.get("canonical_solution"), row.get("task_id"))

    return read_jsonl(data, parse)[:limit]


def choice_problems(data: Path, limit: int) -> list[Problem]:
    """MMLU, ARC and their like: rows of question, choices (texts, or ARC's {text, label}) and answer (an index or a label)."""

    def parse(row: Any) -> Problem:
        choices = row["choices"]
        texts, labels = (choices["text"], choices["label"]) if isinstance(choices, dict) else (choices, LETTERS[: len(choices)])
        answer = row["answer"] if "answer" in row else row["answerKey"]
        if not 2 <= len(texts) <= len(LETTERS) or len(labels) != len(texts):
            raise ValueError(f"there must be 2 to {len(LETTERS)} choices, each with a label")
        at = answer if isinstance(answer, int) else list(labels).index(answer)
        if not 0 <= at < len(texts):
            raise ValueError(f"the answer {answer!r} is none of the {len(texts)} choices")
        listing = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, texts))
        prompt = f"{row['question']}\n{listing}\n\nThink step by step, then end with 'The answer is X.', X being one letter."
        return Problem((prompt,), lambda text: chosen(text) == LETTERS[at], id=row.get("id"))

    return read_jsonl(data, parse)[:limit]


def chosen(text: str) -> str | None:
    """The letter an answer to a question of choice settles on: the last "answer is X", else a single letter all by itself."""
    said = re.findall(rf"(?i:answer is:?)\s*\**\(?([{LETTERS}])\b", text)
    alone = re.fullmatch(rf"\s*\**\(?([{LETTERS}])\)?[.:]?\**\s*", text)
    return said[-1] if said else alone.group(1) if alone else None


def mt_bench_problems(data: Path, limit: int) -> list[Problem]:
    """MT-Bench's questions of two turns; who is right only a judge model can tell."""

    def parse(row: Any) -> Problem:
        turns = tuple(row["turns"])
        if not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise ValueError("turns must be texts")
        return Problem(turns, None, id=row["question_id"])

    return read_jsonl(data, parse)[:limit]


TASKS = {
    "demo": Task(demo_problems, 200, needs_data=False),
    "demo-train": Task(demo_training_problems, 200, needs_data=False),
    "gsm8k": Task(
        gsm8k_problems, 256, raw=True, note=f"its last {SHOTS} rows are worked examples before each question, and not asked"
    ),
    "qa": Task(qa_problems, 256),
    "humaneval": Task(humaneval_problems, 384, raw=True),
    "mmlu": Task(choice_problems, 384),
    "arc": Task(choice_problems, 384),
    "mt-bench": Task(mt_bench_problems, 1024),
}


def read_problems(task: str, data: Path | None, limit: int) -> list[Problem]:
    """A task's first ``limit`` problems. Raises UserError when the data file is missing or not wanted, or a line of it is bad."""
    if limit < 1:
        raise UserError(f"--limit is {limit}; it must be at least 1")
    if data is None and TASKS[task].needs_data:
        raise UserError(f"--task {task} needs --data FILE, a JSON-lines file")
    if data is not None and not TASKS[task].needs_data:
        raise UserError(f"--task {task} makes its own questions; it takes no file ({data})")
    with together():
        problems = TASKS[task].problems(data or Path(), limit)
    same("set of questions", hashlib.sha256(repr([p.turns for p in problems]).encode()).hexdigest()[:12])
    return problems


def encode(tokenizer: Tokenizer, problem: Problem, task: str, answers: tuple[str, ...] = ()) -> list[int]:
    """The ids of the turn that comes after ``answers``, what was said before included."""
    if len(problem.turns) == 1:
        return tokenizer.encode_question(problem.turns[0], TASKS[task].raw)
    messages = []
    for turn, answer in zip(problem.turns, answers):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    return tokenizer.encode_chat([*messages, {"role": "user", "content": problem.turns[len(answers)]}])
