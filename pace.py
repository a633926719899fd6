"""How many tokens to draft: the length that promises the most tokens a second, by what was accepted so far and what rounds cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

LENGTHS = (2, 5, 8, 12, 18, 25, 36)  # few, since each is a graph of its own on CUDA
FORGET = 0.98  # what an observation still counts a round later: texts change as they go on
GUESS, GUESSES = 0.8, 5.0  # the share of drafted tokens accepted, before any was seen, and what that guess counts
POOLED = 4.0  # what the mean over all places counts at each place


class Pace:
    """Chooses M before each round.

    A drafted token's chance, given that all before it were accepted, is estimated for each place of a block from how often it
    was tried and accepted, drawn towards the mean over all places; places that were never tried have the mean.

    Args:
        round_ms: milliseconds of a round, by M: the lengths to choose among.
    """

    def __init__(self, round_ms: Mapping[int, float]) -> None:
        self.round_ms = dict(round_ms)
        self.tried, self.accepted = ([0.0] * max(round_ms) for _ in range(2))

    def saw(self, n: int, M: int) -> None:
        """Take note of a round that accepted n of M drafted tokens."""
        self.tried = [FORGET * x for x in self.tried]
        self.accepted = [FORGET * x for x in self.accepted]
        for i in range(min(n + 1, M)):
            self.tried[i] += 1
            self.accepted[i] += i < n

    def expected(self, M: int) -> float:
        """Tokens that a round of M is expected to commit, the target's own included."""
        mean = (sum(self.accepted) + GUESSES * GUESS) / (sum(self.tried) + GUESSES)
        total = reached = 1.0
        for tried, accepted in zip(self.tried[:M], self.accepted[:M]):
            reached *= (accepted + POOLED * mean) / (tried + POOLED)
            total += reached
        return total

    def best(self) -> int:
        """M of the most expected tokens a millisecond."""
        return max(self.round_ms, key=lambda M: self.expected(M) / self.round_ms[M])


def between(points: Mapping[int, float], x: int) -> float:
    """A value at x on the lines through points; beyond the last two, along their line; before the first, the first's."""
    known = sorted(points)
    if x <= known[0] or len(known) == 1:
        return points[known[0]]
    above = next((i for i, k in enumerate(known) if k >= x), len(known) - 1)
    a, b = known[above - 1], known[above]
    return points[a] + (points[b] - points[a]) * (x - a) / (b - a)


def round_costs(draft_ms: float, rest_ms: Mapping[int, float], lengths: Sequence[int]) -> dict[int, float]:
    """Milliseconds of a round by M, from a draft step's and from all the rest of rounds of some lengths.

    Between two lengths that were measured the rest is taken to lie on the line between them.
    """
    return {M: M * draft_ms + between(rest_ms, M) for M in lengths}
