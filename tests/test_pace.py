"""The draft length that adapts: its estimates, its choice, and that it never does worse than a fixed 5."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pace import LENGTHS, Pace, round_costs


def simulate(chances, round_ms, choose, rounds, seed):
    """Tokens a millisecond over ``rounds`` rounds whose i-th drafted token is accepted with chance chances(i)."""
    source, tokens, ms = random.Random(seed), 0, 0.0
    for _ in range(rounds):
        M, n = choose(None, None), 0
        while n < M and source.random() < chances(n):
            n += 1
        choose(n, M)
        tokens, ms = tokens + n + 1, ms + round_ms[M]
    return tokens / ms


def adaptive(round_ms):
    pace = Pace(round_ms)
    return lambda n, M: pace.best() if n is None else pace.saw(n, M)


@settings(max_examples=40, deadline=None)
@given(
    st.floats(0.05, 1.0), st.floats(-0.02, 0.02), st.floats(0.001, 0.5), st.floats(0.0, 0.1), st.integers(0, 1000),
)  # fmt: skip
def test_it_is_never_much_below_a_fixed_5(chance, slope, draft, row, seed):
    costs = round_costs(draft, {2: 1 + 3 * row, 36: 1 + 37 * row}, LENGTHS)

    def chances(i):
        return min(1.0, max(0.0, chance + slope * i))

    ours = simulate(chances, costs, adaptive(costs), 400, seed)
    assert ours >= 0.9 * simulate(chances, costs, lambda n, M: 5, 400, seed)


@pytest.mark.parametrize("chance", [0.3, 0.7, 0.9, 0.97])
def test_it_finds_the_best_length(chance):
    costs = round_costs(0.05, {2: 1.0, 36: 1.5}, LENGTHS)
    fixed = {M: simulate(lambda i: chance, costs, lambda n, m, M=M: M, 3000, 1) for M in LENGTHS}
    assert simulate(lambda i: chance, costs, adaptive(costs), 3000, 1) > 0.96 * max(fixed.values())


def test_it_follows_a_text_that_changes():
    pace = Pace(round_costs(0.05, {2: 1.0, 36: 1.2}, LENGTHS))
    for _ in range(50):
        pace.saw(36, 36)
    assert pace.best() == 36
    for _ in range(200):
        pace.saw(0, pace.best())
    assert pace.best() == 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(LENGTHS), st.floats(0, 1)), max_size=60))
def test_expected_tokens_lie_between_one_and_all_and_grow_with_the_length(seen):
    pace = Pace(dict.fromkeys(LENGTHS, 1.0))
    for M, share in seen:
        pace.saw(round(share * M), M)
    expected = [pace.expected(M) for M in LENGTHS]
    assert expected == sorted(expected)
    assert all(1 <= e <= M + 1 for e, M in zip(expected, LENGTHS))
    assert pace.best() == LENGTHS[-1]  # where every round costs the same


def test_costs_between_measured_lengths_lie_on_the_line():
    costs = round_costs(2.0, {2: 11.0, 12: 21.0, 36: 21.0}, LENGTHS)
    assert costs == {2: 15.0, 5: 10 + 14, 8: 16 + 17, 12: 45.0, 18: 57.0, 25: 71.0, 36: 93.0}
    assert round_costs(1.0, {5: 3.0}, (5,)) == {5: 8.0}
