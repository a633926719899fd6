"""Where a round's time goes: draft steps, the verify pass, the rest; and what reading the weights alone would take.

Settings are interleaved, one text of each in turn, after a warm-up; figures are medians and, in brackets, the range from the
10th to the 90th of a hundred. A setting is a rule as in evaluate.py, which may be followed by @M, the number of drafted tokens,
or by @auto. MBU is the bandwidth at which weights, keys and values were read, over the machine's own, measured here too.

Without a model named it is the demo pair. --random-weights needs no checkpoint, and --acceptance replays a given m*, so that the
whole round is timed as it would run; --rank-of N times the part of a model that each of N ranks has, on one device, without the
collectives.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import torch
from evaluate import Contender, parse_rules
from plots import require_matplotlib, rounds_figure
from shapes import ROWS, random_model, shape
from tasks import TASKS, encode, read_problems
from torch import Tensor
from tqdm import tqdm

import checkpoint
from engine import Engine, Round, Sampling
from errors import Parser, UserError, run_cli
from files import check_writable
from generate import DEMO, draft_length
from judge import Block, Head
from linear import MODES
from model import Transformer
from pace import LENGTHS
from tp import Ranks, check_divides, local_config, ranks_of, together

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
    read_bytes: int  # weights, keys and values

    @property
    def tokens(self) -> int:
        return sum(len(now.tokens) for now in self.rounds)

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
        self.due += min(self.accepted, len(block.drafted))
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
    stop_ids: tuple[int, ...]
    load_s: float
    names: dict[str, str]
    engines: dict[str, Engine] = field(default_factory=dict)


def measure_bandwidth(device: torch.device) -> float:
    """Bytes a second at which this device, or this process's threads, read memory: the best of seven sums."""
    x = torch.ones(READ_BYTES // 4, dtype=torch.float32, device=device)
    best = 0.0
    for _ in range(7):
        start = time.perf_counter()
        x.sum().item()
        best = max(best, READ_BYTES / (time.perf_counter() - start))
    return best


def measure_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large product: the best of five."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        c = a @ b
        c[0, 0].item()
        best = max(best, 2 * n**3 / (time.perf_counter() - start))
    return best


def parse_settings(args: argparse.Namespace, heads: dict[str, Head], longest_prompt: int) -> list[Setting]:
    """Every rule at every room. Raises UserError for what can't be."""
    found = []
    for text in args.rules.split(","):
        name, _, length = text.partition("@")
        rule = parse_rules(name, heads)[0]
        if rule.name == "draft":
            raise UserError("--rules names draft; to time a draft alone give it as --target")
        if length and rule.name == "plain":
            raise UserError(f"--rules names {text!r}; plain decoding drafts nothing")
        M = draft_length(length) if length else 0 if rule.name == "plain" else 8 if rule.verify == "standard" else 25
        if length and M != "auto" and int(M) < 1:
            raise UserError(f"--rules names {text!r}; @M must be at least 1")
        for room in args.room or [longest_prompt + args.new_tokens]:
            if room < longest_prompt + args.new_tokens:
                raise UserError(
                    f"--room is {room}; the longest prompt and --new-tokens are {longest_prompt + args.new_tokens} together"
                )
            full = f"{text}/{room}" if len(args.room) > 1 else text
            found.append(Setting(full, rule, LENGTHS[-1] if M == "auto" else int(M), M == "auto", room))
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
    return Bench(target, draft, pair.head, prompts, tuple(pair.tokenizer.eos_ids), time.perf_counter() - start, names)


def from_nothing(args: argparse.Namespace, ranks: Ranks) -> Bench:
    """Models of random weights, whole or as one of ``--rank-of`` ranks has them, and random prompts."""
    configs = [shape(name) for name in args.random_weights]
    start = time.perf_counter()
    if args.rank_of > 1:
        for name, config in zip(args.random_weights, configs):
            check_divides(config, args.rank_of, name)
        configs = [local_config(config, args.rank_of) for config in configs]
    dtype = checkpoint.DTYPES[args.dtype]
    models = [random_model(config, args.quantize, dtype, args.device, ranks) for config in configs]
    V, dim = min(config.vocab_size for config in configs), configs[0].dim
    source = torch.Generator().manual_seed(0)
    prompts = [torch.randint(V, (args.prompt_tokens,), generator=source).tolist() for _ in range(args.limit)]
    head = Head(torch.randn(dim, generator=source) * dim**-0.5, 0.0, "post_norm", args.random_weights[0], "", floor=0.0)
    names = dict(zip(("target", "draft"), args.random_weights))
    draft = models[1] if len(models) > 1 else None
    return Bench(models[0], draft, head, prompts, (), time.perf_counter() - start, names)


def build(args: argparse.Namespace, bench: Bench, settings: list[Setting]) -> float:
    """An engine for each setting, warmed up. Returns the seconds that took."""
    start = time.perf_counter()
    device = bench.target.norm.weight.device
    if not args.no_compile:
        for model in (bench.target, bench.draft):
            if model is not None:
                model.compile_blocks(dynamic=device.type == "cpu")
    for s in settings:
        target = bench.target
        if s.rule.head is not None:
            target = bench.target.twin()
            target.fuse_judge(s.rule.head.weight, s.rule.head.bias, s.rule.head.kind, s.rule.head.floor)
        options: dict[str, Any] = {"verify": s.rule.verify, "threshold": s.rule.threshold, "max_len": s.max_len,
                                   "sampling": Sampling(args.temperature)}  # fmt: skip
        if not s.draft_len:
            engine = Engine(target, **options)
        elif args.acceptance is None:
            engine = Engine(target, bench.draft, draft_len=s.draft_len, adapt=s.adapt, **options)
        else:
            engine = Replaying(
                target, bench.draft, draft_len=s.draft_len, adapt=s.adapt, accepted=args.acceptance, **options
            )  # fmt: skip
        engine.warm_up(1, s.max_len)
        bench.engines[s.name] = engine
    return time.perf_counter() - start


def take(engine: Engine, prompt: list[int], new_tokens: int, stop_ids: Sequence[int]) -> Sample:
    """Decode one text up to a stop token or ``new_tokens``, and time it."""
    engine.text = []  # the prompt is read, whatever came before
    engine.wait()
    start = time.perf_counter()
    engine.prefill(prompt)
    engine.wait()
    prefilled = time.perf_counter()
    rounds: list[Round] = []
    read, length, first_s = 0, len(prompt), 0.0
    for now in engine.rounds(len(prompt)):
        first_s = first_s or time.perf_counter() - start
        rounds.append(now)
        read += engine.target.weight_bytes() + length * engine.target.position_bytes()
        if engine.draft is not None:
            read += now.drafted * (engine.draft.weight_bytes() + length * engine.draft.position_bytes())
        length += len(now.tokens)
        if length - len(prompt) >= new_tokens or any(token in stop_ids for token in now.tokens):
            break
    return Sample(prefilled - start, first_s, time.perf_counter() - prefilled, rounds, read)


def run_all(bench: Bench, settings: list[Setting], repeat: int, new_tokens: int) -> dict[str, list[Sample]]:
    """Every setting on every text in turn; the first text of each, unmeasured, warms up."""
    samples: dict[str, list[Sample]] = {s.name: [] for s in settings}
    prompts = bench.prompts
    for i in tqdm(range(-1, repeat), desc="texts of each setting"):
        for s in settings:
            sample = take(bench.engines[s.name], prompts[i % len(prompts)], new_tokens, bench.stop_ids)
            if i >= 0:
                samples[s.name].append(sample)
    return samples


def spread(values: Sequence[float]) -> list[float]:
    """Median, 10th and 90th of a hundred."""
    ordered = sorted(values)
    return [statistics.median(ordered), ordered[round(0.1 * (len(ordered) - 1))], ordered[round(0.9 * (len(ordered) - 1))]]


def row_of(samples: list[Sample], bandwidth: float) -> dict[str, Any]:
    """A setting's figures, [median, 10th, 90th of a hundred] where they vary."""
    rounds = [now for s in samples for now in s.rounds]
    steps = [now.ms["draft"] / now.drafted for now in rounds if now.drafted]
    return {
        "tokens_per_s": spread([s.tokens / s.decode_s for s in samples]),
        "draft_step_ms": spread(steps) if steps else None,
        "verify_ms": spread([now.ms["verify"] for now in rounds]),
        "other_ms": spread([s.other_ms for s in samples]),
        "round_ms": spread([s.round_ms for s in samples]),
        "prefill_s": spread([s.prefill_s for s in samples]),
        "first_token_s": spread([s.first_token_s for s in samples]),
        "mean_accepted": sum(len(now.tokens) - 1 for now in rounds) / len(rounds),
        "draft_len": statistics.median(now.drafted for now in rounds),
        "mbu": statistics.median(s.read_bytes / s.decode_s for s in samples) / bandwidth,
    }


def passes_of(bench: Bench, rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Every kind of pass that was timed, as roofline.py --calibrate reads them."""
    found: dict[tuple[str, int], list[float]] = {}
    for row in rows.values():
        if row["draft_step_ms"] is not None:
            found.setdefault(("draft", 1), []).append(row["draft_step_ms"][0])
        found.setdefault(("target", int(row["draft_len"]) + 1), []).append(row["verify_ms"][0])
    models = {"target": bench.target, "draft": bench.draft}
    return [
        {"model": bench.names[who], "rows": T, "ms": statistics.median(ms), "bytes": model.weight_bytes(),
         "layers": model.config.n_layers}
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
    add("--rules", metavar="LIST", help="settings: plain, or standard, judge[:δ], topk[:K], typical[:ε], kl[:τ], each with @M or "
        "@auto (default: plain, standard, judge as far as there are models for them)")  # fmt: skip
    add("--room", type=int, nargs="+", default=[], metavar="N", help="tokens to allocate caches for (default: what is needed)")
    add("--task", choices=TASKS, default="demo", help="where prompts come from (default: demo)")
    add("--data", type=Path, metavar="FILE", help="the task's JSON-lines file")
    add("--limit", type=int, default=5, metavar="N", help="prompts (default: 5)")
    add("--repeat", type=int, default=5, metavar="N", help="texts of each setting (default: 5)")
    add("--new-tokens", type=int, default=128, metavar="N", help="of a text (default: 128, or up to its end)")
    add("--temperature", type=float, default=0.0, help="default: 0")
    add("--dtype", choices=list(checkpoint.DTYPES), help="default: bfloat16; float32 for the demo pair")
    add("--quantize", choices=["none", *MODES], default="none", help="weights of both models (default: none)")
    add("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--no-compile", action="store_true", help="run the blocks uncompiled")
    add("--plot", type=Path, metavar="FILE", help="write what a token's time is made of as a picture (needs matplotlib)")
    add("--json", action="store_true", help="end stdout with one JSON object; the table goes to stderr")
    args = p.parse_args(argv)
    if args.target is None and args.random_weights is None:
        args.target, args.dtype = str(DEMO / "target"), args.dtype or "float32"
        args.draft, args.judge = args.draft or str(DEMO / "draft"), args.judge or DEMO / "judge.pt"
    args.dtype = args.dtype or "bfloat16"
    check_args(args)
    return args


def check_args(args: argparse.Namespace) -> None:
    """Fill in the settings. Raises UserError for options that contradict each other."""
    if args.random_weights is None:
        for name, given in (("--rank-of", args.rank_of > 1), ("--acceptance", args.acceptance is not None)):
            if given:
                raise UserError(f"{name} is for --random-weights; a checkpoint's own tokens would be overruled")
    else:
        if args.target or args.draft or args.judge:
            raise UserError("--random-weights takes the place of --target, --draft and --judge")
        unknown = [name for name in args.random_weights if name not in ROWS]
        if unknown or len(args.random_weights) > 2:
            raise UserError(f"--random-weights is {' '.join(args.random_weights)}; give a target and a draft of {', '.join(ROWS)}")
    for name in ("rank_of", "prompt_tokens", "limit", "repeat", "new_tokens"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    drafts = args.draft is not None or len(args.random_weights or ()) > 1
    judges = args.judge is not None or args.random_weights is not None
    args.rules = args.rules or ",".join(["plain"] + ["standard"] * drafts + ["judge"] * (drafts and judges))
    if not drafts and args.rules != "plain":
        raise UserError(f"--rules {args.rules} needs a draft")
    if args.acceptance is not None and args.acceptance < 0:
        raise UserError(f"--acceptance is {args.acceptance:g}; it must be at least 0")
    check_writable("--plot", args.plot)
    if args.plot is not None:
        require_matplotlib()


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
    samples = run_all(bench, settings, args.repeat, args.new_tokens)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else checkpoint.peak_memory()
    if ranks.rank:
        return
    machine: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", "threads": torch.get_num_threads(),
        "ranks": ranks.size, "read_gb_s": measure_bandwidth(device) / 1e9, "gflops": measure_flops(device, dtype) / 1e9,
    }  # fmt: skip
    rows = {name: row_of(found, 1e9 * machine["read_gb_s"]) for name, found in samples.items()}
    out = sys.stderr if args.json else sys.stdout
    print(table(rows), file=out)
    print(f"\n{machine['read_gb_s']:.1f} GB/s read here, {machine['gflops']:.0f} GFLOP/s; loaded in {bench.load_s:.1f} s, compiled "
          f"and warmed up in {compile_s:.1f} s; peak memory {peak / 1e9:.2f} GB", file=out)  # fmt: skip
    if args.plot is not None:
        rounds_figure(args.plot, {name: per_token(row) for name, row in rows.items()}, "ms a token")
    if args.json:
        said = {"machine": machine, "models": bench.names, "dtype": args.dtype, "quantize": bench.target.quantization,
                "rank_of": args.rank_of, "load_s": bench.load_s, "compile_s": compile_s, "peak_memory_bytes": peak,
                "settings": rows, "passes": passes_of(bench, rows), "torch": torch.__version__}  # fmt: skip
        print(json.dumps(said))


def per_token(row: dict[str, Any]) -> dict[str, float]:
    """What a committed token's time is made of, in milliseconds."""
    tokens, step = 1 + row["mean_accepted"], row["draft_step_ms"]
    parts = {"draft": row["draft_len"] * step[0] if step else 0.0, "verify": row["verify_ms"][0], "other": row["other_ms"][0]}
    return {name: max(0.0, ms) / tokens for name, ms in parts.items()}


if __name__ == "__main__":
    run_cli(main)
