"""The engine: prefill, draft, verify, accept, and the round that ties them together; and its command line.

All state of a running text lies on the device in fixed buffers. A round is one straight run of device work: M draft steps,
one pass of the target over the M + 1 tokens, acceptance, the commit. Nothing in it depends on a value the host would have to
read, so it can be captured as it stands; the host reads one small result vector when the round is over. Plain decoding is
the same round with M = 0.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import checkpoint
from errors import Parser, UserError, run_cli
from judge import RULES, Block, check_threshold, default_threshold, next_distribution, verdict
from model import PREFILL_CHUNK, Cache, Transformer, common_length
from tokenizer import Output

FIRST_BUCKET = 128  # the cache is read in lengths of 128, 256, 512, ...
DRAFT, STANDARD, RULE, TARGET = "draft", "standard", "rule", "target"


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits. Temperature 0 is greedy and ignores the rest."""

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    seed: int = 0

    def check(self) -> None:
        """Raises UserError for a value outside its range."""
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"--temperature is {self.temperature:g}; it must be a number of at least 0")
        if self.top_k < 0:
            raise UserError(f"--top-k is {self.top_k}; it must be at least 1, or 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p is {self.top_p:g}; it must be above 0 and at most 1")


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
    values = values.masked_fill(p.cumsum(-1) - p >= sampling.top_p, -math.inf)
    return torch.full_like(logits, -math.inf).scatter(-1, ids, values)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw an id [1] from fp32 weights [V] (not all 0, need not sum to 1) by inverting their running sum.

    Args:
        uniform: [1] in [0, 1). Only tokens of weight above 0 can come out, whatever it is.
    """
    sums = weights.cumsum(-1)
    total = sums[-1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))  # the product may round up to the total
    return torch.searchsorted(sums, torch.minimum(uniform * total, below_total), right=True)


class Stopwatch:
    """Where a round's time went: each mark gives the time since the last one to a name. Events on CUDA, so nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = []  # seconds, or events on CUDA

    def mark(self, name: str) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((name, event))
        else:
            self.marks.append((name, time.perf_counter()))

    def read(self) -> dict[str, float]:
        """Milliseconds by name since the first mark; forgets them. On CUDA the device must have passed the last mark."""
        spent: dict[str, float] = {}
        for (_, last), (name, now) in zip(self.marks, self.marks[1:]):
            ms = last.elapsed_time(now) if self.cuda else (now - last) * 1e3
            spent[name] = spent.get(name, 0.0) + ms
        self.marks = []
        return spent


class Round(NamedTuple):
    """What one round committed: its tokens, who accepted each, and where its time went."""

    tokens: list[int]
    accepted_by: list[str]  # STANDARD or RULE for a drafted token, TARGET for the last
    ms: dict[str, float]  # draft, verify, other


class Engine:
    """A target and an optional draft, compiled and with their caches, that decode one text after another.

    Args:
        target, draft: loaded models on one device, of one dtype. Without a draft it decodes plainly.
        draft_len: M, tokens drafted a round.
        verify: ``standard`` or a rule of ``judge.RULES``; ``judge`` needs a head fused into the target.
        threshold: the rule's knob.
        max_len: tokens a text may have, prompt included; caches are allocated for it.
        compile: compile the models' blocks (once for all layers).
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
    ) -> None:
        sampling.check()
        self.target, self.draft, self.verify, self.threshold, self.sampling = target, draft, verify, threshold, sampling
        self.M = draft_len if draft is not None else 0
        if draft is not None and draft_len < 1:
            raise UserError(f"--draft-len is {draft_len}; it must be at least 1")
        for name, model in (("target", target), ("draft", draft)):
            if model is not None and max_len > model.config.max_seq_len:
                raise UserError(f"{max_len} tokens don't fit into the {name}'s context of {model.config.max_seq_len}")
        weight = target.norm.weight
        self.device, self.max_len = weight.device, max_len
        length = bucket_for(max_len + self.M)
        self.target_cache = Cache(target.config, length, weight.dtype, self.device)
        self.draft_cache = Cache(draft.config, length, weight.dtype, self.device) if draft is not None else None
        self.tokens = torch.zeros(length + 1, dtype=torch.int64, device=self.device)
        self.pos = torch.zeros((), dtype=torch.int64, device=self.device)  # of the last committed token
        self.ahead = torch.arange(self.M + 1, device=self.device)
        self.generator = torch.Generator(self.device)
        self.prefix: list[int] = []  # tokens whose keys and values lie at the start of both caches
        V = target.config.vocab_size
        self.draft_logits = torch.zeros((self.M, V), device=self.device) if self._keeps_draft_logits() else None
        self.result = torch.zeros(3 * self.M + 2, dtype=torch.int64, device=self.device)
        self.watch = Stopwatch(self.device)
        if compile:
            for model in (target, draft):
                if model is not None:
                    model.compile_blocks(dynamic=self.device.type == "cpu")

    def _keeps_draft_logits(self) -> bool:
        return self.draft is not None and (self.sampling.temperature > 0 or self.verify == "kl")

    @torch.inference_mode()
    def warm_up(self) -> float:
        """Run a round on an empty text, so that everything is compiled before the clock starts. Returns its seconds."""
        start = time.perf_counter()
        self.pos.zero_()
        self.prefix = []
        for _ in range(2):
            self.round(bucket_for(2 * self.M + 2))
            self.result.tolist()
        self.watch.read()
        return time.perf_counter() - start

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int], seed: int | None = None) -> None:
        """Start a text: both models read the prompt but its last token, which the first round reads.

        No logits are needed here: the first round makes them. Chunks of at most 256 tokens bound the memory. What this prompt
        has in common with the start of the last one is in the caches already and isn't read again.

        Raises:
            UserError: the prompt is empty or longer than ``max_len``.
        """
        if not prompt:
            raise UserError("the prompt is empty; there must be at least one token to continue from")
        if len(prompt) > self.max_len:
            raise UserError(f"the prompt has {len(prompt)} tokens; there is room for {self.max_len}")
        self.generator.manual_seed(self.sampling.seed if seed is None else seed)
        ids = torch.tensor(prompt, device=self.device)
        self.tokens[: len(prompt)] = ids
        self.pos.fill_(len(prompt) - 1)
        read = list(prompt[:-1])
        known = common_length(self.prefix, read)
        self.prefix = read
        for start in range(known, len(read), PREFILL_CHUNK):
            positions = torch.arange(start, min(start + PREFILL_CHUNK, len(read)), device=self.device)
            chunk, bucket = ids[positions], bucket_for(start + len(positions))
            for model, cache in ((self.target, self.target_cache), (self.draft, self.draft_cache)):
                if model is not None and cache is not None:
                    model.step(chunk.clamp(max=model.config.vocab_size - 1), positions, cache, bucket, compiled=False)

    def round(self, bucket: int) -> None:
        """Draft, verify, accept, commit; leaves the outcome in ``result``. ``bucket``: positions of the caches to read.

        ``result`` is [n, the n + 1 committed tokens and rubbish up to M + 1, M standard flags, M rule flags].
        """
        self.watch.mark("start")
        uniform = None
        if self.sampling.temperature > 0:  # one draw for the whole round: M to draft, M to accept, 1 for the next token
            uniform = torch.rand(2 * self.M + 1, generator=self.generator, device=self.device)
        if self.M:
            self._draft_block(bucket, uniform)
        positions = self.pos + self.ahead
        read = self.tokens.index_select(0, positions)  # [cur, d_1, ..., d_M]
        self.watch.mark("other")
        logits, judge = self.target.logits(self.target.step(read, positions, self.target_cache, bucket))
        self.watch.mark("verify")
        logits = warp(logits, self.sampling)
        if self.M:
            self._accept(read[1:], logits, None if judge is None else judge[1:], uniform)
        else:
            self.result[0] = 0
            self.result[1:2] = self._choose(logits, uniform)
        n = self.result[0]
        self.tokens.index_copy_(0, positions + 1, self.result[1 : self.M + 2])
        self.pos += n + 1
        self.watch.mark("other")

    def _choose(self, logits: Tensor, uniform: Tensor | None) -> Tensor:
        """A token [1] from warped logits [1, V]: the likeliest (the first of equals), or a draw."""
        return logits.argmax(-1) if uniform is None else draw(logits[0].softmax(-1), uniform)

    def _draft_block(self, bucket: int, uniform: Tensor | None) -> None:
        """M draft steps, written behind the committed text. The first reads the last *two* tokens: after a wholly accepted
        block the draft has not read the last of it, and re-reading one is cheaper than knowing whether it must."""
        draft, cache, V = self.draft, self.draft_cache, self.target.config.vocab_size
        assert draft is not None and cache is not None
        positions = (self.pos + self.ahead[:2] - 1).clamp(min=0)
        for i in range(self.M):
            read = self.tokens.index_select(0, positions).clamp(max=draft.config.vocab_size - 1)
            self.watch.mark("other")
            logits = draft.logits(draft.step(read, positions, cache, bucket)[-1:])[0]
            self.watch.mark("draft")
            logits = warp(match_vocabulary(logits, V), self.sampling)
            if self.draft_logits is not None:
                self.draft_logits[i] = logits[0]
            positions = (self.pos + i + 1).view(1)
            self.tokens.index_copy_(0, positions, self._choose(logits, None if uniform is None else uniform[i : i + 1]))

    def _accept(self, drafted: Tensor, logits: Tensor, judge: Tensor | None, uniform: Tensor | None) -> None:
        """Apply the rules to a block and write the outcome to ``result``."""
        M = self.M
        tests = None if uniform is None else uniform[M : 2 * M]
        block = Block(drafted, logits[:M], self.draft_logits, judge)
        n, standard, relaxed = verdict(block, self.verify, self.threshold, tests)
        if uniform is None:
            own = logits.index_select(0, n.view(1)).argmax(-1)
        else:
            assert self.draft_logits is not None
            own = draw(next_distribution(logits, self.draft_logits, n), uniform[2 * M :])
        tokens = torch.cat((drafted, own)).index_copy(0, n.view(1), own)
        torch.cat((n.view(1), tokens, standard.long(), relaxed.long()), out=self.result)

    @torch.inference_mode()
    def rounds(self, length: int) -> Iterator[Round]:
        """Run rounds on a prefilled text of ``length`` tokens until ``max_len``, one for each step of the iterator."""
        M = self.M
        while length < self.max_len:
            self.round(bucket_for(length + M))
            n, *values = self.result.tolist()
            standard = values[M + 1 : 2 * M + 1]
            accepted_by = [STANDARD if standard[i] else RULE for i in range(n)] + [TARGET]
            length += n + 1
            yield Round(values[: n + 1], accepted_by, self.watch.read())


def bucket_for(length: int) -> int:
    """The smallest of 128, 256, 512, ... that holds ``length`` positions."""
    return max(FIRST_BUCKET, 1 << max(0, length - 1).bit_length())


def match_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Cut or fill (with -inf) logits [..., V'] to the target's vocabulary; only padding may differ."""
    extra = vocab_size - logits.shape[-1]
    if extra <= 0:
        return logits[..., :vocab_size]
    return torch.nn.functional.pad(logits, (0, extra), value=-math.inf)


@dataclass
class Generation:
    """One generated text and its numbers."""

    output: Output
    prefill_s: float
    decode_s: float
    rounds: list[Round]

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


def generate(engine: Engine, prompt: Sequence[int], output: Output, seed: int | None = None) -> Generation:
    """Prefill and run rounds until the output says it is complete.

    Raises:
        UserError: prompt and new tokens don't fit into the engine's ``max_len``.
    """
    if len(prompt) + output.max_new_tokens > engine.max_len:
        raise UserError(f"{len(prompt)} prompt and {output.max_new_tokens} new tokens don't fit into {engine.max_len}")
    start = time.perf_counter()
    engine.prefill(prompt, seed)
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    prefilled = time.perf_counter()
    rounds = []
    for now in engine.rounds(len(prompt)):
        rounds.append(now)
        if output.add(now.tokens, now.accepted_by):
            break
    return Generation(output, prefilled - start, time.perf_counter() - prefilled, rounds)


DEMO = Path(__file__).parent / "demo"
DEMO_PROMPT = (
    "Ada starts with 80 marbles. Later she donates 4 jars holding 8 marbles apiece. On Sunday she sells "
    "26 marbles. In an old drawer she finds another 34. How many marbles are left in the end?"
)
COLOURS = {STANDARD: "\033[32m", RULE: "\033[1;36m", TARGET: "\033[33m"}
RESET = "\033[0m"
CHAT_CONTEXT = 8192  # tokens a conversation may have: caches for a whole context of 131,072 would take 17 GB for an 8B


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Raises UserError for values that can't be, and for options that contradict each other."""
    p = Parser(description="Decode with a target, a draft and a judge. Without arguments: the demo pair.")
    add = p.add_argument
    add("--target", metavar="NAME", help="checkpoint folder or name under checkpoints/ (default: the demo's target)")
    add("--draft", metavar="NAME", help="draft checkpoint; without one, plain decoding")
    add("--judge", metavar="FILE", type=Path, help="judge head, made by scripts/train_judge.py for this target")
    add("--verify", choices=["standard", *RULES], help="who accepts drafts (default: judge with a head, else standard)")
    add("--threshold", type=float, metavar="X", help="the rule's knob: δ for judge (default: the head's, 0.5), K for topk (5), "
        "ε for typical (0.09), τ for kl (0.3)")  # fmt: skip
    add("--draft-len", type=int, metavar="M", help="tokens drafted a round (default: 25 under the judge, else 8)")
    prompt = p.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt")
    prompt.add_argument("--prompt-file", metavar="F", type=Path, help="read the prompt from a UTF-8 file")
    prompt.add_argument("--interactive", action="store_true", help="chat: read prompts from the terminal until end of file")
    add("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="length cap in tokens (default: 256)")
    add("--stop", nargs="+", default=[], metavar="TEXT", help="end the text before the first of these")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    add("--top-k", type=int, default=0, metavar="K", help="sample among the K likeliest tokens (default: 0, all)")
    add("--top-p", type=float, default=1.0, metavar="P", help="sample among the fewest tokens of probability P (default: 1)")
    add("--seed", type=int, default=0, help="of the draws; sample i uses seed + i (default: 0)")
    add("--dtype", choices=list(checkpoint.DTYPES), help="of weights and caches (default: bfloat16; float32 for the demo pair)")
    add("--device", choices=["cuda", "cpu"], help="default: cuda where there is one")
    add("--no-compile", action="store_true", help="run the blocks uncompiled: starts sooner, decodes slower")
    add("--num-samples", type=int, default=1, metavar="N", help="generate N times; figures are medians (default: 1)")
    add("--show", action="store_true", help="colour each token by who accepted it, even when stdout is no terminal")
    add("--json", action="store_true", help="print one JSON object as the last line of stdout; all else goes to stderr")
    args = p.parse_args(argv)
    if args.target is None and args.draft is None and args.judge is None:
        args.target, args.draft = str(DEMO / "target"), str(DEMO / "draft")
        args.judge = DEMO / "judge.pt" if args.verify in (None, "judge") else None
        args.dtype = args.dtype or "float32"
    args.dtype = args.dtype or "bfloat16"
    check_args(args)
    return args


def check_args(args: argparse.Namespace) -> None:
    """Fill in the defaults that depend on each other. Raises UserError for what can't be."""
    if args.target is None:
        raise UserError("--draft and --judge need a --target")
    if args.draft is None and (args.judge is not None or args.verify not in (None, "standard")):
        raise UserError(f"{'--judge' if args.judge else '--verify ' + args.verify} needs a --draft")
    if args.verify == "judge" and args.judge is None:
        raise UserError("--verify judge needs a head: give --judge FILE")
    args.verify = args.verify or ("judge" if args.judge is not None else "standard")
    if args.verify == "standard" and args.threshold is not None:
        raise UserError(f"--threshold {args.threshold:g} has no meaning for --verify standard")
    if args.threshold is not None:
        check_threshold(args.verify, args.threshold)
    if args.draft_len is None:
        args.draft_len = 25 if args.verify == "judge" else 8
    for name in ("draft_len", "max_new_tokens", "num_samples"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no CUDA device that PyTorch can use")
    sampling_of(args).check()


def sampling_of(args: argparse.Namespace) -> Sampling:
    return Sampling(args.temperature, args.top_k, args.top_p, args.seed)


@dataclass
class Setup:
    """What the command line asked for."""

    args: argparse.Namespace
    pair: checkpoint.Pair
    context: int

    def encode(self, prompt: str | list[dict[str, str]]) -> list[int]:
        """A prompt's ids. Raises UserError when it is empty or leaves no room for the new tokens."""
        if not prompt or not prompt[-1]:
            raise UserError("the prompt is empty; give some text")
        tokenizer = self.pair.tokenizer
        ids = tokenizer.encode_question(prompt, self.args.raw) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)
        if len(ids) > self.context:
            raise UserError(f"the prompt has {len(ids)} tokens; the context is {self.context}")
        if len(ids) + self.args.max_new_tokens > self.context:
            raise UserError(
                f"a prompt of {len(ids)} tokens and --max-new-tokens {self.args.max_new_tokens} are "
                f"{len(ids) + self.args.max_new_tokens} together; the context is {self.context}"
            )
        return ids

    def load(self, max_len: int) -> Engine:
        """Load the models and allocate an engine for texts of ``max_len`` tokens."""
        a = self.args
        target, draft = self.pair.load(checkpoint.DTYPES[a.dtype], a.device)
        threshold = a.threshold
        if threshold is None and a.verify in RULES:
            threshold = default_threshold(a.verify, self.pair.head)
        return Engine(
            target, draft, draft_len=a.draft_len, verify=a.verify, threshold=threshold or 0.0, sampling=sampling_of(a),
            max_len=max_len, compile=not a.no_compile,
        )  # fmt: skip


def report(setup: Setup, engine: Engine, runs: list[Generation], prompt_tokens: int, load_s: float, compile_s: float) -> dict:
    """The JSON object of ``--json``: medians over samples, and the first sample's text."""
    a, first = setup.args, runs[0].output
    rounds = sum(len(r.rounds) for r in runs)
    by = {who: sum(r.accepted(who) for r in runs) for who in (STANDARD, RULE)}
    all_ms = [now.ms for run in runs for now in run.rounds]
    read = engine.target.weight_bytes() + (engine.draft.weight_bytes() * engine.M if engine.draft is not None else 0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "text": first.text,
        "tokens": first.tokens,
        "prompt_tokens": prompt_tokens,
        "new_tokens": len(first.tokens),
        "finish_reason": first.finish_reason,
        "tokens_per_s": statistics.median(r.tokens_per_s for r in runs),
        "prefill_s": statistics.median(r.prefill_s for r in runs),
        "decode_s": statistics.median(r.decode_s for r in runs),
        "load_s": load_s,
        "compile_s": compile_s,
        "rounds": rounds,
        "mean_accepted": sum(by.values()) / rounds,
        "tokens_per_round": sum(len(r.output.tokens) for r in runs) / rounds,
        "accepted_by": {"standard": by[STANDARD], "judge": by[RULE]},
        "draft_ms": statistics.median(ms.get("draft", 0.0) for ms in all_ms),
        "verify_ms": statistics.median(ms.get("verify", 0.0) for ms in all_ms),
        "other_ms": statistics.median(ms.get("other", 0.0) for ms in all_ms),
        "bandwidth_gb_s": statistics.median(read * len(r.rounds) / r.decode_s for r in runs) / 1e9,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if engine.device.type == "cuda" else peak,
        "config": {
            "target": str(setup.pair.target), "draft": str(setup.pair.draft) if setup.pair.draft else None,
            "judge": str(a.judge) if a.judge else None, "verify": engine.verify,
            "threshold": engine.threshold if engine.verify in RULES else None, "draft_len": engine.M,
            "temperature": a.temperature, "top_k": a.top_k, "top_p": a.top_p, "seed": a.seed, "dtype": a.dtype,
            "quantize": "none", "device": a.device, "ranks": 1, "num_samples": a.num_samples, "compile": not a.no_compile,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        },
    }  # fmt: skip


def run_once(setup: Setup, engine: Engine, prompt: list[int], seed: int, colour: bool) -> Generation:
    """Generate one text and stream it to the terminal, with ``--json`` to stderr."""
    stream = sys.stderr if setup.args.json else sys.stdout

    def emit(piece: str, who: str) -> None:
        print(f"{COLOURS[who]}{piece}{RESET}" if colour else piece, end="", file=stream, flush=True)

    output = Output(setup.pair.tokenizer, setup.args.max_new_tokens, setup.args.stop, emit)
    run = generate(engine, prompt, output, seed)
    print(file=stream, flush=True)
    return run


def summary(run: Generation) -> str:
    """One line about a run, for people."""
    n, rounds = len(run.output.tokens), len(run.rounds)
    return (
        f"[{n} tokens in {rounds} rounds: {run.mean_accepted:.1f} drafted tokens accepted a round "
        f"({run.accepted(STANDARD)} by the standard test, {run.accepted(RULE)} by the rule alone); "
        f"{run.tokens_per_s:.1f} tokens/s, prefill {run.prefill_s:.2f} s]"
    )


def chat(setup: Setup, colour: bool) -> None:
    """Read prompts from the terminal and answer each in the light of the conversation so far."""
    setup.context = min(setup.context, CHAT_CONTEXT)
    engine = setup.load(setup.context)
    engine.warm_up()
    messages: list[dict[str, str]] = []
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            return
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        try:
            raw = setup.args.raw or not setup.pair.tokenizer.has_chat_template
            run = run_once(setup, engine, setup.encode(text if raw else messages), setup.args.seed, colour)
        except UserError as error:
            print(f"{error}; starting afresh", file=sys.stderr)
            messages = []
            continue
        messages.append({"role": "assistant", "content": run.output.text})
        print(summary(run), file=sys.stderr)


def main() -> None:
    args = parse_args()
    pair = checkpoint.find_pair(args.target, args.draft, args.judge)
    setup = Setup(args, pair, pair.context)
    colour = args.show or (sys.stdout.isatty() and not args.json)
    if args.interactive:
        return chat(setup, colour)
    text = DEMO_PROMPT if args.prompt is None else args.prompt
    if args.prompt_file is not None:
        try:
            text = args.prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--prompt-file {args.prompt_file} can't be read: {error}") from None
    prompt = setup.encode(text)
    start = time.perf_counter()
    engine = setup.load(len(prompt) + args.max_new_tokens)
    load_s = time.perf_counter() - start
    compile_s = engine.warm_up()
    runs = []
    for i in range(args.num_samples):
        runs.append(run_once(setup, engine, prompt, args.seed + i, colour))
        print(summary(runs[-1]), file=sys.stderr)
    if args.json:
        print(json.dumps(report(setup, engine, runs, len(prompt), load_s, compile_s), ensure_ascii=False))


if __name__ == "__main__":
    run_cli(main)
