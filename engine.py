"""The engine: prefill, draft, verify, accept, and the round that ties them together.

All state of a running text lies on the device in fixed buffers. A round is one straight run of device work: M draft steps,
one pass of the target over the M + 1 tokens, acceptance, the commit. Nothing in it depends on a value the host would have to
read: on CUDA it is one graph, and the host reads a round's small result vector while the next one runs (``launch.py``). Plain
decoding is the same round with M = 0.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from errors import UserError
from judge import Block, judge_logits, log_probabilities, next_distribution, verdict
from launch import Flight, Launcher, Stopwatch
from model import Cache, Transformer
from pace import LENGTHS, Pace, round_costs
from tokenizer import Output
from tp import agree, best_and_log_p, best_of, told

FIRST_BUCKET = 128  # the cache is read in lengths of 128, 256, 512, ...
STANDARD, RULE, TARGET = "standard", "rule", "target"


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits. Temperature 0 is greedy and ignores the rest."""

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    seed: int = 0

    def check(self) -> None:
        """Raises UserError for a value outside its range."""
        if self.temperature != 0 and not 1e-3 <= self.temperature < math.inf:
            raise UserError(f"`temperature` is {self.temperature:g}; it must be 0 (greedy) or a number of at least 0.001")
        if not 0 <= self.seed < 1 << 63:
            raise UserError(f"`seed` is {self.seed}; it must be at least 0 and below 2^63")
        if self.top_k < 0:
            raise UserError(f"`top_k` is {self.top_k}; it must be at least 1, or 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise UserError(f"`top_p` is {self.top_p:g}; it must be above 0 and at most 1")


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Apply temperature, then top-k, then top-p to fp32 logits [T, V]; excluded tokens become -inf.

    Top-p keeps the fewest likeliest tokens whose probabilities reach it. A new sampling option goes here.
    """
    if sampling.temperature == 0:
        return logits
    logits = logits / sampling.temperature
    if not sampling.top_k and sampling.top_p == 1:
        return logits
    k = min(sampling.top_k or logits.shape[-1], logits.shape[-1])
    values, ids = logits.topk(k, -1)
    p = values.softmax(-1)
    if sampling.top_p < 1:  # or the sum's rounding would cut the last of very many tokens
        values = values.masked_fill(p.cumsum(-1) - p >= sampling.top_p, -math.inf)
    return torch.full_like(logits, -math.inf).scatter(-1, ids, values)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw an id [1] from fp32 weights [V] (not all 0, need not sum to 1) by inverting their running sum.

    Args:
        uniform: [1] in [0, 1). Only tokens of weight above 0 can come out, whatever it is.
    """
    sums = weights.cumsum(-1).cummax(-1).values  # a parallel sum may fall back by a rounding
    total = sums[-1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))  # the product may round up to the total
    at = torch.searchsorted(sums, torch.minimum(uniform * total, below_total), right=True)
    return at.clamp(max=len(weights) - 1)  # were they no numbers, the search would end behind the last


class Note(NamedTuple):
    """What the models thought at one place of a block; probabilities are those that tokens are drawn from."""

    best: int  # the target's likeliest token here
    p_best: float
    drafted: int  # -1 behind the last drafted token
    p: float  # of the drafted token by the target
    q: float  # the same by the draft
    judge: float  # sigmoid(z), nan without a head


class Round(NamedTuple):
    """What one round committed: its tokens, who accepted each, and where its time went."""

    tokens: list[int]
    accepted_by: list[str]  # STANDARD or RULE for a drafted token, TARGET for the last
    drafted: int  # M
    ms: dict[str, float]  # draft, verify, other
    notes: list[Note] | None = None  # one for each token, of a tracing engine


class Engine:
    """A target and an optional draft, compiled and with their caches, that decode one text after another.

    Args:
        target, draft: loaded models on one device, of one dtype. Without a draft it decodes plainly.
        draft_len: M, tokens drafted a round; with ``adapt`` the most of them.
        verify: ``standard`` or a rule of ``judge.RULES``; ``judge`` needs a head fused into the target.
        threshold: the rule's knob.
        max_len: tokens a text may have, prompt included; caches are allocated for it.
        compile: compile the models' blocks (once for all layers).
        trace: note at each place what the models thought (costs time; for pictures).
        check_ranks: compare in every round what the ranks decided, before rank 0's word is taken (for debugging).
        adapt: choose M before each round among ``pace.LENGTHS``, by the acceptance so far and costs that ``warm_up`` measures.
        capture: on CUDA let rounds be graphs.
        run_ahead: rounds launched before an outcome is read (default: 1 where rounds are CUDA graphs, else 0).
        caches: the target's and the draft's, of ``cache_length`` positions or more, which several engines of the same models may
            share, one text at a time (default: new ones).
    """

    def __init__(
        self,
        target: Transformer,
        draft: Transformer | None = None,
        *,
        draft_len: int = 8,
        verify: str = "standard",
        threshold: float = 0.5,
        sampling: Sampling = Sampling(),
        max_len: int = 2048,
        compile: bool = False,
        trace: bool = False,
        check_ranks: bool = False,
        adapt: bool = False,
        capture: bool = True,
        run_ahead: int | None = None,
        caches: tuple[Cache, Cache | None] | None = None,
    ) -> None:
        sampling.check()
        self.target, self.draft, self.verify, self.threshold, self.sampling = target, draft, verify, threshold, sampling
        self.M = draft_len if draft is not None else 0
        if draft is not None and not 1 <= draft_len < target.config.max_seq_len:
            raise UserError(
                f"`draft_len` is {draft_len}; it must be at least 1, and below the context of {target.config.max_seq_len}"
            )
        for name, model in (("target", target), ("draft", draft)):
            if model is not None and max_len > model.config.max_seq_len:
                raise UserError(f"{max_len} tokens don't fit into the {name}'s context of {model.config.max_seq_len}")
        weight = target.norm.weight
        self.device, self.max_len = weight.device, max_len
        self.lengths = tuple(M for M in LENGTHS if M <= self.M) if adapt and self.M else ()
        self.pace: Pace | None = None  # until rounds were timed
        self.warm = False  # until they ran once
        # what a trace or a check holds must be read before the next round
        captured = capture and self.device.type == "cuda" and not trace and not check_ranks
        self.run_ahead = int(captured) if run_ahead is None else run_ahead
        needed = cache_length(max_len, self.M, self.run_ahead)
        if caches is None:
            caches = target.new_cache(needed), draft.new_cache(needed) if draft is not None else None
        self.target_cache, self.draft_cache = caches[0], caches[1] if draft is not None else None
        self.length = length = self.target_cache.length
        if length < needed:
            raise ValueError(f"shared caches have {length} positions; {max_len} tokens need {needed}")
        self.tokens = torch.zeros(length + 1, dtype=torch.int64, device=self.device)
        self.pos = torch.zeros((), dtype=torch.int64, device=self.device)  # of the last committed token
        self.ahead = torch.arange(self.M + 1, device=self.device)
        self.generator = torch.Generator(self.device)
        self.pending: list[int] = []  # the end of the text, which not both models have read: at most two tokens
        V = target.config.vocab_size
        self.trace = torch.zeros((self.M + 1, len(Note._fields)), device=self.device) if trace else None
        # without them greedy decoding sends but a few numbers between ranks
        self.whole_logits = sampling.temperature > 0 or verify not in ("standard", "judge") or trace
        self.check_ranks = check_ranks
        self.draft_logits = torch.zeros((self.M, V), device=self.device) if self._keeps_draft_logits() else None
        self.result = torch.zeros(3 * self.M + 2, dtype=torch.int64, device=self.device)
        self.watch = Stopwatch(self.device)
        self.launcher = Launcher(self.result, self.trace, self.watch, self.run_ahead + 1, self.generator, captured)
        if compile:
            for model in (target, draft):
                if model is not None:
                    model.compile_blocks(dynamic=self.device.type == "cpu")

    def _keeps_draft_logits(self) -> bool:
        return self.draft is not None and (self.sampling.temperature > 0 or self.verify == "kl" or self.trace is not None)

    def _bucket(self, length: int) -> int:
        """Positions of the caches to read where ``length`` are in use: 128, 256, 512, ..., or all there are."""
        return min(bucket_of(length), self.length)

    @torch.inference_mode()
    def warm_up(self, first: int = 1, last: int = 1) -> float:
        """Run rounds on an empty text, so that what they need is compiled, captured and, to adapt, timed before the clock starts.

        Args:
            first, last: lengths of text between which rounds will run. On CUDA each bucket of the cache among them has its
                graphs; those of others are made when a text comes to them. On a CPU one round serves all.

        Returns its seconds.
        """
        start = time.perf_counter()
        self.forget()
        if self.lengths:
            self._time_lengths()
        reach = (self.M + 1) * (self.run_ahead + 1)
        buckets = {self._bucket(first + self.M)}
        if self.launcher.capture:
            while max(buckets) < self._bucket(last + reach):
                buckets.add(self._bucket(max(buckets) + 1))
        times = 0 if self.lengths and not self.launcher.capture else 2
        for bucket in sorted(buckets):
            for M in self.lengths or (self.M,):
                self._trial(M, times, bucket)
        self.warm = True
        return time.perf_counter() - start

    def _trial(self, M: int, times: int, bucket: int = FIRST_BUCKET) -> list[dict[str, float]]:
        """Run a round of M a few times on an empty text, and each slot's graph. Returns the milliseconds by name of each."""
        found = []
        for _ in range(times + len(self.launcher.slots) * self.launcher.capture):
            self.pos.zero_()
            found.append(self._launch(M, bucket).outcome()[1])
        return found

    def _time_lengths(self) -> None:
        """Learn what a round costs by M. On a CPU, where that takes longer, the ends are timed and the rest lies between them."""
        measured = self.lengths if self.device.type == "cuda" else (self.lengths[0], self.lengths[-1])
        trials = {M: self._trial(M, 3) for M in measured}
        best = {M: {name: min(ms[name] for ms in found[1:]) for name in found[0]} for M, found in trials.items()}
        longest = measured[-1]
        costs = round_costs(
            best[longest]["draft"] / longest, {M: ms["verify"] + ms["other"] for M, ms in best.items()}, self.lengths
        )  # fmt: skip
        self.pace = Pace(told(lambda: costs))  # every rank chooses by rank 0's

    def forget(self) -> None:
        """Drop the text: the next prompt is read from its start, whatever it has in common with this one."""
        for _, cache in self._readers():
            cache.text.clear()
            cache.owner = None

    def _readers(self) -> list[tuple[Transformer, Cache]]:
        """The models, each with its cache."""
        pairs = ((self.target, self.target_cache), (self.draft, self.draft_cache))
        return [(model, cache) for model, cache in pairs if model is not None and cache is not None]

    def wait(self) -> None:
        """Wait until the device has done what it was given, a round that nobody will read included."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int], seed: int | None = None) -> None:
        """Start a text: both models read the prompt but its last token, which the first round reads.

        No logits are needed here: the first round makes them. What this prompt has in common with the start of the last text,
        answer included, is in the caches already and isn't read again.

        Raises:
            UserError: the prompt is empty or longer than ``max_len``.
        """
        if not prompt:
            raise UserError("the prompt is empty; there must be at least one token to continue from")
        check_vocabulary(prompt, self.target.config.vocab_size)
        if len(prompt) > self.max_len:
            raise UserError(f"the prompt has {len(prompt)} tokens; there is room for {self.max_len}")
        self.generator.manual_seed(self.sampling.seed if seed is None else seed)
        ids = torch.tensor(prompt, device=self.device)
        self.tokens[: len(prompt)] = ids
        self.pos.fill_(len(prompt) - 1)
        owner = object()
        for model, cache in self._readers():
            cache.owner = owner
            model.read(prompt[:-1], cache)
        self.pending = list(prompt[-1:])

    def round(self, M: int, bucket: int) -> None:
        """Draft M, verify, accept, commit; leaves the outcome in ``result``. ``bucket``: positions of the caches to read.

        ``result`` begins with [n, the n + 1 committed tokens and rubbish up to M + 1, M standard flags, M rule flags]; n is -1, and
        nothing is committed, where the target's logits are no numbers.
        """
        self.watch.mark("start")
        uniform = None
        if self.sampling.temperature > 0:  # one draw for the whole round: M to draft, M to accept, 1 for the next token
            uniform = torch.rand(2 * M + 1, generator=self.generator, device=self.device)
        if M:
            self._draft_block(M, bucket, uniform)
        positions = self.pos + self.ahead[: M + 1]
        read = self.tokens.index_select(0, positions)  # [cur, d_1, ..., d_M]
        self.watch.mark("other")
        states = self.target.step(read, positions, self.target_cache, bucket)
        if self.whole_logits:
            logits, judge = self.target.logits(states)
            heard = judge is not None and (self.verify != "standard" or self.trace is not None)
            log_p = log_probabilities(logits[:-1], read[1:]) if heard else None
            logits = warp(logits, self.sampling)
            top, best = logits.max(-1)
        else:
            local, judge = self.target.local_logits(states)
            # at each place what was drafted there; at the last nothing was
            drafted = torch.cat((read[1:], read[:1])) if self.verify == "judge" else None
            best, top, log_p = best_and_log_p(local, self.target.ranks, self.target.config.vocab_size, drafted)
            logits, log_p = None, None if log_p is None else log_p[:-1]
        z = judge_logits(self.target, judge[1:], log_p) if judge is not None and log_p is not None else None
        self.watch.mark("verify")
        if M:
            given = None if logits is None else logits[:-1]
            q = None if self.draft_logits is None else self.draft_logits[:M]
            block = Block(read[1:], best[:-1], given, q, z, log_p, self.target.judge_floor)
            self._accept(block, best, logits, uniform)
        else:
            self.result[0] = 0
            self.result[1:2] = self._choose(best, logits, uniform)
        # -1 where a place that counts has no likeliest token, for its logits are no numbers
        unsound = (~top.isfinite() & (self.ahead[: M + 1] <= self.result[0])).any()
        self.result[0] = torch.where(unsound, -1, self.result[0])
        if self.target.ranks.size > 1:
            agree(self.result, self.check_ranks)
        if self.trace is not None and logits is not None:
            self._note(read[1:], logits, z)
        n = self.result[0]
        self.tokens.index_copy_(0, positions + 1, self.result[1 : M + 2])
        self.pos += n + 1
        self.watch.mark("other")

    def _choose(self, best: Tensor, logits: Tensor | None, uniform: Tensor | None) -> Tensor:
        """A token [1]: the likeliest, or a draw from warped logits [1, V]."""
        if uniform is None:
            return best
        assert logits is not None
        return draw(logits[0].softmax(-1), uniform)

    def _draft_block(self, M: int, bucket: int, uniform: Tensor | None) -> None:
        """M draft steps, written behind the committed text. The first reads the last *two* tokens: after a wholly accepted
        block the draft has not read the last of it, and re-reading one is cheaper than knowing whether it must."""
        draft, cache, V = self.draft, self.draft_cache, self.target.config.vocab_size
        assert draft is not None and cache is not None
        positions = (self.pos + self.ahead[:2] - 1).clamp(min=0)
        for i in range(M):
            read = draft.known(self.tokens.index_select(0, positions))
            self.watch.mark("other")
            states = draft.step(read, positions, cache, bucket)[-1:]
            positions = (self.pos + i + 1).view(1)
            if self.draft_logits is None:
                token = best_of(draft.local_logits(states)[0], draft.ranks, V)
                self.watch.mark("draft")
            else:
                logits = draft.logits(states)[0]
                self.watch.mark("draft")
                logits = warp(match_vocabulary(logits, V), self.sampling)
                self.draft_logits[i] = logits[0]
                token = self._choose(logits.argmax(-1), logits, None if uniform is None else uniform[i : i + 1])
            self.tokens.index_copy_(0, positions, token)
        if draft.ranks.size < self.target.ranks.size:  # each rank has drafted for itself
            places = self.pos + self.ahead[1 : M + 1]
            block = self.tokens.index_select(0, places)
            agree(block, self.check_ranks)
            self.tokens.index_copy_(0, places, block)

    def _accept(self, block: Block, best: Tensor, logits: Tensor | None, uniform: Tensor | None) -> None:
        """Apply the rules to a block and write the outcome to ``result``. best [M + 1], logits [M + 1, V]."""
        M = len(block.drafted)
        n, standard, relaxed = verdict(block, self.verify, self.threshold, None if uniform is None else uniform[M : 2 * M])
        if uniform is None:
            own = best.index_select(0, n.view(1))
        else:
            assert block.draft_logits is not None and logits is not None
            own = draw(next_distribution(logits, block.draft_logits, n), uniform[2 * M :])
        tokens = torch.cat((block.drafted, own)).index_copy(0, n.view(1), own)
        torch.cat((n.view(1), tokens, standard.long(), relaxed.long()), out=self.result[: 3 * M + 2])

    def _note(self, drafted: Tensor, logits: Tensor, z: Tensor | None) -> None:
        """Fill ``trace``, a row for each place of the block, fields as in ``Note`` (ids are exact in fp32 up to 2^24)."""
        assert self.trace is not None
        M, p = len(drafted), logits.softmax(-1)
        p_best, best = p.max(-1)
        self.trace.fill_(math.nan)
        self.trace[: M + 1, 0], self.trace[: M + 1, 1], self.trace[: M + 1, 2] = best, p_best, -1
        if M:
            assert self.draft_logits is not None
            own = drafted[:, None]
            self.trace[:M, 2], self.trace[:M, 3] = drafted, p[:M].gather(-1, own)[:, 0]
            self.trace[:M, 4] = self.draft_logits[:M].softmax(-1).gather(-1, own)[:, 0]
            if z is not None:
                self.trace[:M, 5] = z.sigmoid()

    def _launch(self, M: int, length: int) -> Flight:
        """Launch a round of M; with what it may commit, the text has at most ``length`` tokens."""
        bucket = self._bucket(length)
        return self.launcher.launch((M, bucket), M, lambda: self.round(M, bucket))

    @torch.inference_mode()
    def rounds(self, length: int) -> Iterator[Round]:
        """Run rounds on a prefilled text of ``length`` tokens until ``max_len``, one for each step of the iterator.

        Rounds that were launched ahead when the caller leaves are lost; they change nothing that a later text reads.

        Raises:
            UserError: the target's logits are no numbers; another text was begun on the caches since the last round.
        """
        flying: deque[Flight] = deque()
        owner = self.target_cache.owner
        while length < self.max_len:
            if any(cache.owner is not owner for _, cache in self._readers()):
                raise UserError("another text was begun on these models; a stream can't go on after that")
            while len(flying) <= self.run_ahead:
                M = self.M if self.pace is None else self.pace.best()
                flying.append(self._launch(M, length + M + sum(other.M + 1 for other in flying)))
            flight = flying.popleft()
            (n, *values), ms, trace = flight.outcome()
            M = flight.M
            if n < 0:
                where = f"the target's logits behind token {length}"
                raise UserError(f"{where} are no numbers: its weights are damaged, or too big for this `dtype`")
            if self.pace is not None:
                self.pace.saw(n, M)
            standard = values[M + 1 : 2 * M + 1]
            accepted_by = [STANDARD if standard[i] else RULE for i in range(n)] + [TARGET]
            length += n + 1
            self._committed(values[: n + 1])
            notes = None
            if trace is not None:
                notes = [Note(int(best), p, int(drafted), *rest) for best, p, drafted, *rest in trace[: n + 1]]
            yield Round(values[: n + 1], accepted_by, M, ms, notes)

    def _committed(self, tokens: list[int]) -> None:
        """Note what a round added to the text. The last token nobody has read, and the last but one perhaps not the draft."""
        self.pending += tokens
        for _, cache in self._readers():
            cache.text += self.pending[:-2]
        del self.pending[:-2]

    def complete(self, prompt: Sequence[int], max_new_tokens: int, stop_ids: Collection[int] = ()) -> list[int]:
        """The ids that follow a prompt: up to a stop token, which is left out, or ``max_new_tokens``."""
        self.prefill(prompt)
        ids: list[int] = []
        for now in self.rounds(len(prompt)):
            for token in now.tokens:
                if token in stop_ids or len(ids) == max_new_tokens:
                    return ids
                ids.append(token)
            if len(ids) == max_new_tokens:
                break
        return ids


def check_vocabulary(prompt: Sequence[int], vocab_size: int) -> None:
    """Raises UserError where an id of a prompt is none of the target's."""
    for token in (min(prompt), max(prompt)):
        if not 0 <= token < vocab_size:
            raise UserError(f"token {token} is beyond the target's vocabulary of {vocab_size}")


def bucket_of(length: int) -> int:
    """Positions of a cache that are read where so many are in use."""
    return max(FIRST_BUCKET, 1 << max(0, length - 1).bit_length())


def cache_length(max_len: int, draft_len: int, run_ahead: int) -> int:
    """Positions that caches for texts of ``max_len`` tokens have: the last rounds may reach beyond the end."""
    length = max_len + draft_len + run_ahead * (draft_len + 1)
    return -(-length // FIRST_BUCKET) * FIRST_BUCKET


def match_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Cut or fill (with -inf) logits [..., V'] to the target's vocabulary; only padding may differ."""
    extra = vocab_size - logits.shape[-1]
    if extra <= 0:
        return logits[..., :vocab_size]
    return torch.nn.functional.pad(logits, (0, extra), value=-math.inf)


@dataclass
class Generation:
    """One text and its numbers, as far as it has come."""

    output: Output
    prefill_s: float = 0.0
    decode_s: float = 0.0  # without what whoever watches it grow does in between
    rounds: list[Round] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.output.text

    @property
    def tokens(self) -> list[int]:
        return self.output.tokens

    @property
    def finish_reason(self) -> str:
        """``stop`` or ``length``; empty for a text that was not waited for."""
        return self.output.finish_reason

    @property
    def tokens_per_s(self) -> float:
        return len(self.output.tokens) / self.decode_s

    @property
    def mean_accepted(self) -> float:
        """Accepted drafted tokens a round (the paper's m*), those cut off left out."""
        return (self.accepted(STANDARD) + self.accepted(RULE)) / len(self.rounds)

    def accepted(self, who: str) -> int:
        """Drafted tokens of the trimmed text that ``who`` (STANDARD or RULE) accepted."""
        return self.output.accepted_by.count(who)


def decode(engine: Engine, prompt: Sequence[int], output: Output, seed: int | None = None) -> Iterator[Generation]:
    """Prefill and run rounds until the output says it is complete; yields the one generation after each of these.

    Raises:
        UserError: prompt and new tokens don't fit into the engine's ``max_len``.
    """
    to_come = output.max_new_tokens - len(output.tokens)
    if len(prompt) + to_come > engine.max_len:
        raise UserError(f"{len(prompt)} prompt and {to_come} new tokens don't fit into {engine.max_len}")
    engine.wait()
    start = time.perf_counter()
    engine.prefill(prompt, seed)
    engine.wait()
    run, ended = Generation(output, time.perf_counter() - start), False
    yield run
    start, rounds = time.perf_counter(), engine.rounds(len(prompt))
    while not ended and (now := next(rounds, None)) is not None:
        run.rounds.append(now)
        ended = output.add(now.tokens, now.accepted_by)
        run.decode_s += time.perf_counter() - start
        yield run
        start = time.perf_counter()


def generate(engine: Engine, prompt: Sequence[int], output: Output, seed: int | None = None) -> Generation:
    """What ``decode`` comes to."""
    return deque(decode(engine, prompt, output, seed), maxlen=1).pop()
