"""The soak in small: some texts agree with the reference, a planted fault and a leak are found."""

from __future__ import annotations

import random

import pytest
import soak

import engine
from llm import LLM


@pytest.fixture(scope="module")
def llm():
    return LLM(context=220, compile=False)


def test_texts_agree_with_the_reference(llm):
    found, rng, last = soak.Found(), random.Random(5), []
    questions = [problem.question for problem in soak.unseen_problems(20)]
    for _ in range(12):
        last = soak.one(llm, rng, questions, last, found)
    assert not found.faults and found.texts == 12 and found.left >= 1 and found.tokens > 100


def test_a_planted_fault_is_found(llm, monkeypatch):
    accept = engine.verdict
    # the rule takes one token too many
    monkeypatch.setattr(engine, "verdict", lambda block, *rest: (accept(block, *rest)[0].clamp(min=1), *accept(block, *rest)[1:]))
    found = soak.soak(60, 1, llm)
    assert len(found.faults) == 1 and "expected" in found.faults[0]


def test_what_grows_is_a_leak():
    steady = soak.Found(memory=[200, *[100] * 99])  # the first text may take what it likes
    assert steady.growth() == 0
    assert soak.Found(memory=[100 + i for i in range(100)]).growth() > soak.LEAK
