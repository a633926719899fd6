"""The demo task: stories add up, answers say what the story says, and mistakes lie where they are said to."""

import random
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import demo_task as task

PROBLEMS = task.unseen_problems(300)


def test_every_step_adds_up_and_stays_in_range() -> None:
    for problem in PROBLEMS:
        total = problem.start
        for step in problem.steps:
            if step.groups:
                assert step.amount == step.groups * step.each
            total += step.sign * step.amount
            assert 10 <= total <= 99
        assert total == problem.answer


def test_the_question_gives_every_number() -> None:
    for problem in PROBLEMS:
        said = [int(n) for n in re.findall(r"\d+", problem.question)]
        told = [problem.start]
        for step in problem.steps:
            told += [step.groups, step.each] if step.groups else [step.amount]
        assert said == told


@pytest.mark.parametrize("shares", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0.5, 0.3, 0.2)])
def test_right_in_every_wording(shares: tuple[float, float, float]) -> None:
    rng = random.Random(1)
    for problem in PROBLEMS:
        text = task.to_text(task.write_solution(problem, rng, shares))
        assert task.is_right(problem, text)
        assert "  " not in text and text.startswith(" ") and text.endswith(".")


def test_wordings_part_often() -> None:
    """The target's and the draft's wordings part at least twice in every equation, or standard decoding would accept much."""
    rng = random.Random(1)
    for problem in PROBLEMS:
        first = task.write_solution(problem, rng, (1, 0, 0))
        second = task.write_solution(problem, rng, (0, 1, 0))
        parted = sum(a.text != b.text for a, b in zip(first, second, strict=True))
        assert parted >= 3 * len(problem.steps)
        assert all(p.text[0] in " .,:" for p in first + second)


def test_the_answer_is_the_last_number() -> None:
    assert task.extract_answer(" First 3 * 4 = 12. The answer is 47 stamps.") == 47
    assert task.extract_answer(" no number") is None
    assert not task.is_right(PROBLEMS[0], f" The answer is {PROBLEMS[0].answer + 1} stamps.")
    assert not task.is_right(PROBLEMS[0], "")


def test_wrong_forms_are_wrong_and_part_where_said() -> None:
    rng = random.Random(2)
    for problem in PROBLEMS:
        for piece in task.write_solution(problem, rng, (0, 1, 0)):
            if not task.can_go_wrong(piece):
                continue
            wrong = task.wrong_form(piece, rng)
            assert wrong != piece.text and wrong.startswith(" ")
            if piece.kind == "number":
                assert wrong.strip().isdigit() and int(wrong) != int(piece.text)
            at = task.first_difference(piece.text, wrong)
            assert wrong[:at] == piece.text[:at] and wrong[at : at + 1] != piece.text[at : at + 1]


def test_unseen_problems_are_fixed_and_never_trained_on() -> None:
    assert [p.question for p in PROBLEMS[:20]] == [p.question for p in task.unseen_problems(20)]
    assert len({p.question for p in task.unseen_problems(1000)}) == 1000
    rng = random.Random(3)
    rng.random()  # the draw that decides on one step
    first = task.make_problem(rng)
    assert next(task.training_problems(random.Random(3), frozenset({first.question}))).question != first.question
    short = task.training_problems(random.Random(3), frozenset(), one_step=1.0)
    assert {len(next(short).steps) for _ in range(20)} == {1}
