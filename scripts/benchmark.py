"""Where a round's time goes: draft steps, the verify pass, the rest; and what reading the weights alone would take.

Settings are interleaved, one text of each in turn, after a warm-up; figures are medians and, in brackets, the range from the
10th to the 90th of a hundred. A setting is a rule as in evaluate.py, which may be followed by @M, the number of drafted tokens,
or by @auto. MBU is the bandwidth at which weights, keys and values were read, over the machine's own, measured after each text.

Without a model named it is the demo pair. --random-weights needs no checkpoint, and --acceptance replays a given m*, so that the
whole round is timed as it would run; --rank-of N times the part of a model that each of N ranks has, on one device, without the
collectives.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

import torch
from evaluate import Contender, check_once, parse_rules
from plots import check_plot, rounds_figure
from shapes import ROWS, random_model, shape
from tasks import TASKS, encode, read_problems
from torch import Tensor
from tqdm import tqdm

import checkpoint
from engine import TARGET, Engine, Round, Sampling
from judge import Block, Head, rules_with_knobs
from linear import MODES, Linear, group_of
from llm import DEMO, default_dtype
from model import Transformer
from pace import LENGTHS
from tp import Ranks, check_divides, default_device, local_config, ranks_of, together

READ_BYTES = 1 << 30  # read to measure a bandwidth: more than any cache holds


class Setting(NamedTuple):
    """One row of the table."""

    name: str
    rule: Contender
    draft_len: int  # 0: plain decoding
    adapt: bool
    max_len: int


class Sample(NamedTuple):
    """One text."""

    prefill_s: float
    first_token_s: float  # from the prompt to the first round's tokens
    decode_s: float
    rounds: list[Round]
    tokens: int  # of the text; those of the last round behind its end are left out
    accepted: int  # drafted ones among them
    read_bytes: int  # weights, keys and values
    bandwidth: float = 0.0  # of the machine just afterwards, bytes a second

    @property
    def round_ms(self) -> float:
        """Of the clock, the host's share included."""
        return 1e3 * self.decode_s / len(self.rounds)

    @property
    def other_ms(self) -> float:
        """A round's time outside both models."""
        return self.round_ms - sum(now.ms.get("draft", 0.0) + now.ms["verify"] for now in self.rounds) / len(self.rounds)


class Replaying(Engine):
    """An engine that accepts what it is told: on the mean ``accepted`` drafted tokens a round, whatever the models say.

    Everything is computed as ever; only the number is replaced, on the device.
    """

    def __init__(self, *args: Any, accepted: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.accepted = accepted
        self.due = torch.zeros((), dtype=torch.float64, device=self.device)

    def _accept(self, block: Block, best: Tensor, logits: Tensor | None, uniform: Tensor | None) -> None:
        super()._accept(block, best, logits, uniform)
        self.due += self.accepted
        n = self.due.floor()
        self.due -= n
        self.result[0] = n


@dataclass
class Bench:
    """The models and texts, however they were come by."""

    target: Transformer
    draft: Transformer | None
    head: Head | None
    prompts: list[list[int]]
    stop_ids: frozenset[int]
    load_s: float
    names: dict[str, str]
    engines: dict[str, Engine] = field(default_factory=dict)


def bandwidth_meter(device: torch.device) -> Callable[[int], float]:
    """What measures the bytes a second at which this device, or this process's threads, read memory: the best of so many sums."""
    x = torch.ones(READ_BYTES // 4, dtype=torch.float32, device=device)
    times = 4 if device.type == "cuda" else 1  # on a GPU one sum is over before the host has noticed

    def measure(sums: int) -> float:
        best = 0.0
        for _ in range(sums):
            start = time.perf_counter()
            for _ in range(times):
                total = x.sum()
            total.item()
            best = max(best, times * READ_BYTES / (time.perf_counter() - start))
        return best

    return measure


def measure_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large product: the best of five. On a CPU of 64 rows, by the loops that verify passes use."""
    if device.type == "cpu":
        layer = Linear(2048, 2048, bias=False).to(dtype).requires_grad_(False)
        x, operations = torch.ones((64, 2048), dtype=dtype), 2 * 64 * 2048**2
        product = functools.partial(layer, x)
    else:
        a, b = (torch.ones((8192, 8192), device=device, dtype=dtype) for _ in range(2))
        operations, product = 2 * 8192**3, functools.partial(torch.mm, a, b)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        product()[0, 0].item()
        best = max(best, operations / (time.perf_counter() - start))
    return best


def parse_setting(text: str, heads: dict[str, Head], max_len: int) -> Setting:
    """``plain``, or a rule with its knob and @M: ``standard``, ``judge:0.3@12``, ``topk:5@auto``. Raises UserError."""
    adapt = text.endswith("@auto")
    rule = parse_rules(text.removesuffix("@auto"), heads)[0]
    if rule.name == "draft":
        raise UserError("--rules names draft; to time a draft alone give it as --target")
    if adapt and rule.name == "plain":
        raise UserError(f"--rules names {text!r}; plain decoding drafts nothing")
    return Setting(text, rule, LENGTHS[-1] if adapt else rule.draft_len, adapt, max_len)


def parse_settings(args: argparse.Namespace, heads: dict[str, Head], longest_prompt: int) -> list[Setting]:
    """Every rule at every room. Raises UserError for what can't be."""
    found: list[Setting] = []
    for text in args.rules.split(","):
        setting = parse_setting(text, heads, 0)
        if args.acceptance is not None and setting.adapt:
            raise UserError(f"--rules names {text!r}, whose length would follow --acceptance {args.acceptance:g}; give a number")
        if args.acceptance is not None and setting.draft_len and args.acceptance > setting.draft_len:
            raise UserError(f"--acceptance is {args.acceptance:g}; {text} drafts {setting.draft_len} tokens a round")
        for room in args.room or [longest_prompt + args.new_tokens]:
            if room < longest_prompt + args.new_tokens:
                raise UserError(
                    f"--room is {room}; the longest prompt and --new-tokens are {longest_prompt + args.new_tokens} together"
                )
            found.append(setting._replace(name=f"{text}/{room}" if len(args.room) > 1 else text, max_len=room))
    check_once([setting.name for setting in found])
    return found


def from_checkpoints(args: argparse.Namespace) -> Bench:
    """Load the models named, and the task's prompts."""
    pair = checkpoint.find_pair(args.target, args.draft, args.judge)
    with together():
        problems = read_problems(args.task, args.data, args.limit)
        prompts = [encode(pair.tokenizer, problem, args.task) for problem in problems]
    start = time.perf_counter()
    target, draft = pair.load(checkpoint.DTYPES[args.dtype], args.device, args.quantize)
    names = {"target": pair.target.name, "draft": pair.draft.name if pair.draft else "none"}
    return Bench(target, draft, pair.head, prompts, frozenset(pair.tokenizer.eos_ids), time.perf_counter() - start, names)


def from_nothing(args: argparse.Namespace, ranks: Ranks) -> Bench:
    """Models of random weights, whole or as one of ``--rank-of`` ranks has them, and random prompts."""
    configs = [shape(name) for name in args.random_weights]
    if args.rank_of > 1 and ranks.size > 1:
        raise UserError(f"--rank-of {args.rank_of} times one rank's part; start it without torchrun")
    start = time.perf_counter()
    if args.rank_of > 1:
        for name, config in zip(args.random_weights, configs):
            check_divides(config, args.rank_of, name, group_of(args.quantize) if args.quantize.startswith("int4") else 1)
        configs = [local_config(config, args.rank_of) for config in configs]
    dtype = checkpoint.DTYPES[args.dtype]
    models = [random_model(config, args.quantize, dtype, args.device, ranks) for config in configs]
    V, dim = min(config.vocab_size for config in configs), configs[0].dim
    source = torch.Generator().manual_seed(0)
    prompts = [torch.randint(V, (args.prompt_tokens,), generator=source).tolist() for _ in range(args.limit)]
    head = Head(torch.randn(dim, generator=source) * dim**-0.5, 0.0, "post_norm", args.random_weights[0], "", floor=0.0)
    names = dict(zip(("target", "draft"), args.random_weights))
    draft = models[1] if len(models) > 1 else None
    return Bench(models[0], draft, head, prompts, frozenset(), time.perf_counter() - start, names)


def engine_of(s: Setting, target: Transformer, draft: Transformer | None, made: type[Engine] = Engine, **options: Any) -> Engine:
    """An engine for a setting, of the class ``made``; the models may serve several."""
    target = target if s.rule.head is None else s.rule.head.on(target)
    options |= {"verify": s.rule.verify, "threshold": s.rule.threshold, "max_len": s.max_len}
    return made(target, draft, draft_len=s.draft_len, adapt=s.adapt, **options) if s.draft_len else made(target, **options)


def build(args: argparse.Namespace, bench: Bench, settings: list[Setting]) -> float:
    """An engine for each setting, warmed up. Returns the seconds that took."""
    start = time.perf_counter()
    device = bench.target.norm.weight.device
    if not args.no_compile:
        for model in (bench.target, bench.draft):
            if model is not None:
                model.compile_blocks(dynamic=device.type == "cpu")
    for s in settings:
        options: dict[str, Any] = {"sampling": Sampling(args.temperature)}
        if s.draft_len and args.acceptance is not None:
            options |= {"made": Replaying, "accepted": args.acceptance}
        bench.engines[s.name] = engine = engine_of(s, bench.target, bench.draft, **options)
        engine.warm_up(1, s.max_len)
    return time.perf_counter() - start


def take(engine: Engine, prompt: list[int], new_tokens: int, stop_ids: frozenset[int]) -> Sample:
    """Decode one text up to a stop token or ``new_tokens``, and time it."""
    engine.forget()  # the prompt is read, whatever came before
    engine.wait()
    start = time.perf_counter()
    engine.prefill(prompt)
    engine.wait()
    prefilled = time.perf_counter()
    rounds: list[Round] = []
    first_s, tokens = 0.0, list[int]()
    for now in engine.rounds(len(prompt)):
        first_s = first_s or time.perf_counter() - start
        rounds.append(now)
        tokens += now.tokens
        if len(tokens) >= new_tokens or not stop_ids.isdisjoint(now.tokens):
            break
    decode_s = time.perf_counter() - prefilled
    end = next((i for i, token in enumerate(tokens) if token in stop_ids), new_tokens)
    by = [who for now in rounds for who in now.accepted_by][:end]
    return Sample(
        prefilled - start, first_s, decode_s, rounds, len(by), len(by) - by.count(TARGET), bytes_read(engine, rounds, prompt)
    )


def bytes_read(engine: Engine, rounds: list[Round], prompt: Sequence[int]) -> int:
    """Weights, keys and values that a text's rounds read."""
    total, length = 0, len(prompt)
    models = (engine.target,) if engine.draft is None else (engine.target, engine.draft)
    weights, positions = [model.weight_bytes() for model in models], [model.position_bytes() for model in models]
    for now in rounds:
        for times, weight, position in zip((1, now.drafted), weights, positions):
            total += times * (weight + length * position)
        length += len(now.tokens)
    return total


def warm_up(bench: Bench, settings: list[Setting], repeat: int, new_tokens: int) -> None:
    """Every setting once on each prompt, unmeasured."""
    for prompt in bench.prompts[:repeat]:
        for s in settings:
            take(bench.engines[s.name], prompt, new_tokens, bench.stop_ids)


def run_all(bench: Bench, settings: list[Setting], repeat: int, new_tokens: int) -> dict[str, list[Sample]]:
    """Every setting on every text in turn, and after each the machine's bandwidth."""
    samples: dict[str, list[Sample]] = {s.name: [] for s in settings}
    prompts, bandwidth = bench.prompts[:repeat], bandwidth_meter(bench.target.norm.weight.device)
    for i in tqdm(range(repeat), desc="texts of each setting", disable=None):
        for s in settings:
            sample = take(bench.engines[s.name], prompts[i % len(prompts)], new_tokens, bench.stop_ids)
            samples[s.name].append(sample._replace(bandwidth=bandwidth(2)))
    return samples


def spread(values: Sequence[float]) -> list[float]:
    """Median, 10th and 90th of a hundred."""
    ordered = sorted(values)
    return [statistics.median(ordered), ordered[round(0.1 * (len(ordered) - 1))], ordered[round(0.9 * (len(ordered) - 1))]]


def row_of(samples: list[Sample]) -> dict[str, Any]:
    """A setting's figures, [median, 10th, 90th of a hundred] where they vary."""
    rounds = [now for s in samples for now in s.rounds]
    steps = [now.ms["draft"] / now.drafted for now in rounds if now.drafted]
    return {
        "tokens_per_s": spread([s.tokens / s.decode_s for s in samples]),
        "n": len(samples),
        "draft_step_ms": spread(steps) if steps else None,
        "verify_ms": spread([now.ms["verify"] for now in rounds]),
        "other_ms": spread([s.other_ms for s in samples]),
        "round_ms": spread([s.round_ms for s in samples]),
        "prefill_s": spread([s.prefill_s for s in samples]),
        "first_token_s": spread([s.first_token_s for s in samples]),
        "mean_accepted": sum(s.accepted for s in samples) / len(rounds),
        "draft_len": statistics.median(now.drafted for now in rounds),
        "mbu": statistics.median(s.read_bytes / s.decode_s / s.bandwidth for s in samples),
    }


def passes_of(bench: Bench, settings: list[Setting], samples: dict[str, list[Sample]]) -> list[dict[str, Any]]:
    """Every kind of pass that was timed, as roofline.py --calibrate reads them; those of changing lengths are left out."""
    found: dict[tuple[str, int], list[float]] = {}
    for s in settings:
        rounds = [now for sample in samples[s.name] for now in sample.rounds]
        if s.draft_len > 3 and not s.adapt:  # of a short block the first step, which reads two tokens, is too large a part
            found.setdefault(("draft", 1), []).extend(now.ms["draft"] / now.drafted for now in rounds)
        if not s.adapt:
            found.setdefault(("target", s.draft_len + 1), []).extend(now.ms["verify"] for now in rounds)
    models = {"target": bench.target, "draft": bench.draft}
    lengths = [len(p) + sum(len(now.tokens) for now in t.rounds) / 2 for ts in samples.values() for t, p in zip(ts, bench.prompts)]
    length = statistics.mean(lengths)
    return [
        {"model": bench.names[who], "rows": T, "ms": statistics.median(ms), "layers": model.config.n_layers,
         "read_bytes": model.weight_bytes() + length * model.position_bytes()}
        for (who, T), ms in found.items() if (model := models[who]) is not None
    ]  # fmt: skip


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The figures as Markdown; speeds also over the first setting's."""
    heads = ("setting", "tokens/s", "over the first", "m*", "M", "ms a draft step", "ms a verify pass", "ms outside the models",
             "ms a round", "MBU", "prefill s", "first token s")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "| --- " + "| ---: " * (len(heads) - 1) + "|"]
    first = next(iter(rows.values()))["tokens_per_s"][0]

    def ranged(value: list[float] | None, digits: int = 2) -> str:
        return "" if value is None else f"{value[0]:.{digits}f} ({value[1]:.{digits}f}–{value[2]:.{digits}f})"

    for name, r in rows.items():
        cells = (
            name, ranged(r["tokens_per_s"], 1), f"{r['tokens_per_s'][0] / first:.2f}", f"{r['mean_accepted']:.2f}",
            f"{r['draft_len']:g}", ranged(r["draft_step_ms"]), ranged(r["verify_ms"]), ranged(r["other_ms"]),
            ranged(r["round_ms"]), f"{r['mbu']:.2f}", f"{r['prefill_s'][0]:.3f}", f"{r['first_token_s'][0]:.3f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    add("--target", metavar="NAME", help="checkpoint (default: the demo's, with its draft and judge)")
    add("--draft", metavar="NAME", help="draft checkpoint; without one, plain decoding alone")
    add("--judge", type=Path, metavar="FILE", help="judge head")
    add("--random-weights", nargs="+", metavar="SHAPE", help=f"target and draft of random weights: {', '.join(ROWS)}")
    add("--rank-of", type=int, default=1, metavar="N", help="with --random-weights: time the part that each of N ranks has")
    add(
        "--acceptance", type=float, metavar="M*", help="with --random-weights: accept this many drafted tokens a round, on the mean"
    )
    add("--prompt-tokens", type=int, default=128, metavar="N", help="with --random-weights: tokens of a prompt (default: 128)")
    add("--rules", metavar="LIST", help=f"settings: plain, or standard, {rules_with_knobs()}, each with @M or "
        "@auto (default: plain, standard, judge as far as there are models for them)")  # fmt: skip
    add("--room", type=int, nargs="+", default=[], metavar="N", help="tokens to allocate caches for (default: what is needed)")
    add("--task", choices=TASKS, default="demo", help="where prompts come from (default: demo)")
    add("--data", type=Path, metavar="FILE", help="the task's JSON-lines file")
    add("--limit", type=int, default=5, metavar="N", help="prompts (default: 5)")
    add("--repeat", type=int, default=5, metavar="N", help="texts of each setting (default: 5)")
    add("--new-tokens", type=int, default=128, metavar="N", help="tokens of a text (default: 128, or up to its end)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    add("--dtype", choices=list(checkpoint.DTYPES), help="default: bfloat16; float32 for the demo pair")
    add("--quantize", choices=["none", *MODES], default="none", help="weights of both models (default: none)")
    add("--device", choices=["cuda", "cpu"], default=default_device(), help="default: cuda where there is one")
    add("--no-compile", action="store_true", help="run the blocks uncompiled")
    add("--plot", type=Path, metavar="FILE", help="write what a token's time is made of as a picture (needs matplotlib)")
    add("--json", action="store_true", help="end stdout with one JSON object; the table goes to stderr")
    args = p.parse_args(argv)
    if args.target is None and args.random_weights is None:
        args.target = str(DEMO / "target")
        args.draft, args.judge = args.draft or str(DEMO / "draft"), args.judge or DEMO / "judge.pt"
    args.dtype = args.dtype or ("bfloat16" if args.target is None else default_dtype(args.target))
    check_args(args)
    return args


def check_args(args: argparse.Namespace) -> None:
    """Fill in the settings. Raises UserError for options that contradict each other."""
    if args.random_weights is None:
        for name, given in (("--rank-of", args.rank_of > 1), ("--acceptance", args.acceptance is not None)):
            if given:
                raise UserError(f"{name} is for --random-weights; a checkpoint's own tokens would be overruled")
    else:
        if args.target or args.draft or args.judge or args.data or args.task != "demo":
            raise UserError("--random-weights takes the place of --target, --draft, --judge, --task and --data")
        unknown = [name for name in args.random_weights if name not in ROWS]
        if unknown or len(args.random_weights) > 2:
            raise UserError(f"--random-weights is {' '.join(args.random_weights)}; give a target and a draft of {', '.join(ROWS)}")
    for name in ("rank_of", "prompt_tokens", "limit", "repeat", "new_tokens"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    drafts = args.draft is not None or len(args.random_weights or ()) > 1
    judges = args.judge is not None or args.random_weights is not None
    standard = drafts and args.acceptance is None  # an acceptance that is given is the judge's
    args.rules = args.rules or ",".join(["plain"] + ["standard"] * standard + ["judge"] * (drafts and judges))
    if not drafts and args.rules != "plain":
        raise UserError(f"--rules {args.rules} needs a draft")
    if args.acceptance is not None and not 0 <= args.acceptance < math.inf:
        raise UserError(f"--acceptance is {args.acceptance:g}; it must be a number of at least 0")
    if args.acceptance is not None and args.rules == "plain":
        raise UserError(f"--acceptance {args.acceptance:g} has no meaning for plain decoding")
    if args.judge is not None and not drafts:
        raise UserError(f"--judge {args.judge} needs a --draft")
    check_plot(args.plot)


def main() -> None:
    args = parse_args()
    with ranks_of(args.device) as ranks, torch.inference_mode():
        run(args, ranks)


def run(args: argparse.Namespace, ranks: Ranks) -> None:
    """Measure, as one of the ranks; rank 0 tells."""
    bench = from_checkpoints(args) if args.random_weights is None else from_nothing(args, ranks)
    heads = {"judge": bench.head} if bench.head is not None else {}
    settings = parse_settings(args, heads, max(map(len, bench.prompts)))
    device, dtype = bench.target.norm.weight.device, checkpoint.DTYPES[args.dtype]
    compile_s = build(args, bench, settings)
    warm_up(bench, settings, args.repeat, args.new_tokens)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else checkpoint.peak_memory()
    samples = run_all(bench, settings, args.repeat, args.new_tokens)
    if ranks.rank:
        return
    read = statistics.median(sample.bandwidth for found in samples.values() for sample in found)
    machine: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", "threads": torch.get_num_threads(),
        "ranks": ranks.size, "read_gb_s": read / 1e9, "gflops": measure_flops(device, dtype) / 1e9,
    }  # fmt: skip
    rows = {name: row_of(found) for name, found in samples.items()}
    out = sys.stderr if args.json else sys.stdout
    print(table(rows), file=out)
    print(f"\n{machine['read_gb_s']:.1f} GB/s read here, {machine['gflops']:.0f} GFLOP/s; loaded in {bench.load_s:.1f} s, compiled "
          f"and warmed up in {compile_s:.1f} s; peak memory {peak / 1e9:.2f} GB", file=out)  # fmt: skip
    if args.plot is not None:
        rounds_figure(args.plot, {name: per_token(row) for name, row in rows.items()}, "ms a token")
    if args.json:
        said = {"machine": machine, "models": bench.names, "dtype": args.dtype, "quantize": bench.target.quantization,
                "rank_of": args.rank_of, "load_s": bench.load_s, "compile_s": compile_s, "peak_memory_bytes": peak,
                "settings": rows, "passes": passes_of(bench, settings, samples), "torch": torch.__version__}  # fmt: skip
        print(json.dumps(said))


def per_token(row: dict[str, Any]) -> dict[str, float]:
    """What a committed token's time is made of, in milliseconds."""
    tokens, step = 1 + row["mean_accepted"], row["draft_step_ms"]
    parts = {"draft": row["draft_len"] * step[0] if step else 0.0, "verify": row["verify_ms"][0], "other": row["other_ms"][0]}
    return {name: max(0.0, ms) / tokens for name, ms in parts.items()}


if __name__ == "__main__":
    run_cli(main)
