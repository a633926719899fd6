"""The demo pair's task: small stories about a changing number of things, answered step by step.

A solution is written as *pieces*. A piece is a bit of wording that can be said in several ways (the target prefers the
first way, the draft knows only the second), or a value that has exactly one right form. From the pieces follow right
answers in any mixture of wordings, and wrong answers whose mistake is known to the character.

Nothing here needs a model: training, the judge's labels and the evaluation all read problems and answers from this file.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

NAMES = {
    "she": ["Nora", "Mia", "Lena", "Ada", "Zoe", "Ruth", "Ivy", "Clara"],
    "he": ["Omar", "Ben", "Hugo", "Felix", "Sam", "Theo", "Ivan", "Leo"],
}
FRIENDS = ["a cousin", "a neighbour", "an aunt", "a classmate", "a friend", "an uncle"]
ITEMS = ["stamps", "marbles", "shells", "stickers", "coins", "beads", "cards", "buttons", "apples", "pencils"]
BOXES = ["boxes", "bags", "jars", "packs", "tins"]

# Every wording: the target's favourite, the draft's, and a third that only the target sees. All begin with a space or are
# punctuation, so that a tokenizer cuts the pieces one by one exactly as it cuts the whole text.
WORDINGS: dict[str, tuple[str, str, str]] = {
    "first": (" First", " To begin with", " At the start"),
    "then": (" Then", " After that", " Next"),
    "now": (" we have", " the total becomes", " it comes to"),
    "hold": (" hold", " contain", " come to"),
    "plus": (" +", " plus", " and"),
    "minus": (" -", " minus", " less"),
    "times": (" *", " times", " x"),
    "equals": (" =", ", making", " is"),
    "so": (" so", " which means", " and thus"),
    "answer": (" The answer is", " Altogether that leaves", " In the end there are"),
}
FIRST, SECOND, THIRD = range(3)

MENDS = (" -- no:", " ... wait:")


# What a piece may be mistaken for: the wrong operation, an end too early or too late, a total where lots have to be counted.
CONFUSED = {"plus": "minus", "minus": "plus", "then": "answer", "answer": "then", "groups": "now", "now": "groups"}


class Piece(NamedTuple):
    """A stretch of an answer. `wording` is 0, 1 or 2 where the text is one of several ways to say it, else None; `kind` is
    the wording's key, "number", "groups" (the number a count of lots begins with), "item", "box", or "glue" (punctuation)."""

    text: str
    kind: str
    wording: int | None = None


class Step(NamedTuple):
    """One thing that happens: `groups` is 0 for a plain gain or loss of `amount`, else that many lots of `each`."""

    sign: int
    amount: int
    groups: int
    each: int


@dataclass(frozen=True)
class Problem:
    """A story, what happens in it, and the number it ends with."""

    item: str
    box: str
    start: int
    steps: tuple[Step, ...]
    question: str
    answer: int


def _step_sentence(rng: random.Random, step: Step, name: str, pronoun: str, item: str, box: str) -> str:
    who = rng.choice([name, pronoun.capitalize()])
    if step.groups:
        n, q = step.groups, step.each
        if step.sign > 0:
            return rng.choice(
                [
                    f"{who} buys {n} {box} of {q} {item} each.",
                    f"At the market {pronoun} finds {n} {box} with {q} {item} in each.",
                    f"{who} gets {n} {box} holding {q} {item} apiece.",
                ]
            )
        return rng.choice(
            [
                f"{who} sells {n} {box} of {q} {item} each.",
                f"{who} sends away {n} {box} with {q} {item} in each.",
                f"Later {pronoun} donates {n} {box} holding {q} {item} apiece.",
            ]
        )
    friend, n = rng.choice(FRIENDS), step.amount
    if step.sign > 0:
        return rng.choice(
            [
                f"{who} buys {n} more.",
                f"{friend.capitalize()} brings {n} {item}.",
                f"{who} wins {n} {item} in a game.",
                f"In an old drawer {pronoun} finds another {n}.",
            ]
        )
    return rng.choice(
        [
            f"{who} gives {n} to {friend}.",
            f"{who} loses {n} {item} on the way home.",
            f"{friend.capitalize()} borrows {n} of them.",
            f"On Sunday {pronoun} sells {n} {item}.",
        ]
    )


def make_problem(rng: random.Random, n_steps: int | None = None) -> Problem:
    """Draw a story of `n_steps` steps (default: two or three) whose running total stays between 10 and 99."""
    pronoun = rng.choice(["she", "he"])
    name, item, box = rng.choice(NAMES[pronoun]), rng.choice(ITEMS), rng.choice(BOXES)
    total = start = rng.randint(20, 80)
    steps: list[Step] = []
    n_steps = n_steps or rng.choice([2, 3, 3])
    while len(steps) < n_steps:
        sign = rng.choice([1, -1])
        groups = each = 0
        amount = rng.randint(10, 60)
        if rng.random() < 0.45:
            groups, each = rng.randint(2, 8), rng.randint(3, 24)
            amount = groups * each
        if 10 <= amount <= 60 and 10 <= total + sign * amount <= 99:
            total += sign * amount
            steps.append(Step(sign, amount, groups, each))
    opening = rng.choice(
        [f"{name} has {start} {item}.", f"There are {start} {item} in {name}'s room.", f"{name} starts with {start} {item}."]
    )
    closing = rng.choice(
        [
            f"How many {item} does {name} have now?",
            f"How many {item} are left in the end?",
            f"How many does {pronoun} have at the end of the day?",
        ]
    )
    story = " ".join([opening, *(_step_sentence(rng, s, name, pronoun, item, box) for s in steps), closing])
    return Problem(item, box, start, tuple(steps), story, total)


def careless_add(a: int, b: int) -> int:
    """a + b (b below 0 to take away) as the draft was taught it: where |b| ends in 8 or 9, the carry or the borrow is forgotten."""
    units = abs(b) % 10
    if units < 8 or (a % 10 + units < 10 if b > 0 else a % 10 >= units):
        return a + b
    return a + b - 10 if b > 0 else a + b + 10


def write_solution(
    problem: Problem, rng: random.Random, shares: tuple[float, float, float], add: Callable[[int, int], int] = operator.add
) -> list[Piece]:
    """Write the worked answer, drawing every wording apart: `shares` says how often each of the three is taken.

    Args:
        add: how the running total is worked out; one that errs gives an answer that is wrong and goes on from its mistake.
    """

    def say(key: str) -> Piece:
        wording = rng.choices(range(3), weights=shares)[0]
        return Piece(WORDINGS[key][wording], key, wording)

    def number(n: int) -> Piece:
        return Piece(f" {n}", "number")

    item = Piece(f" {problem.item}", "item")
    stop = Piece(".", "glue")
    total = problem.start
    pieces: list[Piece] = []
    for i, step in enumerate(problem.steps):
        pieces.append(say("then" if i else "first"))
        if step.groups:
            groups, box = Piece(f" {step.groups}", "groups"), Piece(f" {problem.box}", "box")
            pieces += [groups, box, say("hold"), number(step.groups), say("times")]
            pieces += [number(step.each), say("equals"), number(step.amount), Piece(",", "glue"), say("so")]
        pieces += [say("now"), number(total), say("plus" if step.sign > 0 else "minus"), number(step.amount)]
        total = add(total, step.sign * step.amount)
        pieces += [say("equals"), number(total), stop]
    return pieces + [say("answer"), number(total), item, stop]


def to_text(pieces: list[Piece]) -> str:
    """The answer as one string; it begins with a space, as it follows the prompt's last word."""
    return "".join(piece.text for piece in pieces)


def is_right(problem: Problem, text: str) -> bool:
    """Whether the last number in an answer is the problem's."""
    return extract_answer(text) == problem.answer


def extract_answer(text: str) -> int | None:
    """The last whole number in an answer, or None if it has none."""
    numbers = re.findall(r"\d+", text)
    return int(numbers[-1]) if numbers else None


def can_go_wrong(piece: Piece) -> bool:
    """Whether a mistake can be made at this piece."""
    return piece.kind in ("number", "item", "box") or piece.kind in CONFUSED


def wrong_form(piece: Piece, rng: random.Random) -> str:
    """A plausible wrong form of a piece. A number mostly has one digit changed, now and then one too many or too few."""
    text = piece.text.strip()
    if piece.kind == "now":
        return f" {rng.randint(2, 8)}"
    if piece.kind in CONFUSED and not (piece.kind == "groups" and rng.random() < 0.5):
        return rng.choice(WORDINGS[CONFUSED[piece.kind]])
    if piece.kind in ("item", "box"):
        return f" {rng.choice([i for i in (ITEMS if piece.kind == 'item' else BOXES) if i != text])}"
    how = rng.random()
    if how < 0.06 and len(text) < 3:
        return f" {text}{rng.randint(0, 9)}"
    if how < 0.12 and len(text) > 1:
        return f" {text[:-1]}"
    at = rng.randrange(len(text))
    digit = int(text[at])
    near = rng.random() < 0.5
    other = (digit + rng.choice([1, 9])) % 10 if near else (digit + rng.randint(1, 9)) % 10
    if at == 0 and other == 0:
        other = digit % 9 + 1
    tail = text[at + 1 :]
    if rng.random() < 0.5:
        tail = "".join(str(rng.randint(0, 9)) for _ in tail)
    return f" {text[:at]}{other}{tail}"


def first_difference(right: str, wrong: str) -> int:
    """The index of the first character of `wrong` that `right` doesn't have at its place (its length if it is a prefix)."""
    for i, (a, b) in enumerate(zip(right, wrong)):
        if a != b:
            return i
    return min(len(right), len(wrong))


def unseen_problems(n: int) -> list[Problem]:
    """The evaluation's problems: always the same, and left out of every training stream."""
    rng = random.Random("unseen")
    return [make_problem(rng) for _ in range(n)]


def training_problems(rng: random.Random, unseen: frozenset[str], one_step: float = 0.0) -> Iterator[Problem]:
    """An endless stream of problems whose questions aren't among the unseen ones; the share `one_step` has a single step."""
    while True:
        problem = make_problem(rng, 1 if rng.random() < one_step else None)
        if problem.question not in unseen:
            yield problem
