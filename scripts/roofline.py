"""What a round should take: milliseconds of a draft step, a verify pass and the round, what they are made of, and the bound.

A pass over T tokens reads each weight once. Its time is the sum of

  bytes        weights over the bandwidth that kernels reach (--efficiency of the memory's), or, where that takes longer, the
               arithmetic over the tensor cores' peak
  attention    keys and values of the text, shared by programs as attention.py plans it: each reads at 75 GB/s, all of them together
               at what kernels reach of the memory's bandwidth, and the last one combines the parts in 1.5 us and the time of
               reading their sums; the fastest of the plans that are measured. With --attention sdpa the cache's whole bucket,
               which each program, one for every key head and 64 queries, reads at 75 GB/s
  kernels      10 small kernels a layer and 8 around the layers, of which each costs --kernel-us beside its bytes
  collectives  two sums a layer and one for the embedding, of --collective-us and their bytes over the link; one exchange of maxima

and a round is M draft steps, a verify pass, 40 kernels of acceptance and one broadcast. The bound is the bytes alone, at the
memory's full bandwidth. On a CPU, which can't multiply and read at once as well as a GPU does, bytes and arithmetic are added up.
With --calibrate the time for each byte comes from what scripts/benchmark.py measured on the machine, at each number of tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

import torch
from shapes import find_shape, shape, unloaded_model

import checkpoint
from attention import MOST_TOKENS, Plan, plans_for
from engine import bucket_of
from linear import MODES
from model import Config
from pace import between
from tp import SMALL_BYTES, Ranks

KERNELS_A_LAYER, KERNELS_A_PASS, KERNELS_A_ROUND = 10, 8, 40
COLLECTIVE_US = {"symmetric": 9.0, "nccl": 18.0}  # a small all-reduce inside a graph (SGLang #10571: 9; 16 to 19)
PROGRAM_BANDWIDTH = 75e9  # what one multiprocessor reads alone
EXCHANGE_US = 1.5  # sums to the second-level cache, a counter, and back
LONGEST_BLOCK = 64


@dataclass(frozen=True)
class Machine:
    """A device and what is taken for granted about it. Bandwidths in bytes/s."""

    name: str
    bandwidth: float
    flops: float
    efficiency: float = 0.85
    kernel_us: float = 2.0
    collective: str = "symmetric"
    link: float = 450e9  # between two devices, in one direction
    processors: int = 132
    attention: str = "divided"  # or sdpa
    cpu: bool = False
    measured: dict[int, float] = field(default_factory=dict)  # tokens -> seconds for each byte of weights; empty: by the above


GPUS = {  # peak memory bandwidth, dense bf16 arithmetic, NVLink
    "a100": Machine("a100", 2.039e12, 312e12, collective="nccl", link=300e9, processors=108),
    "h100": Machine("h100", 3.35e12, 989e12),
    "h200": Machine("h200", 4.8e12, 989e12),
    "b200": Machine("b200", 8.0e12, 2250e12, link=900e9, processors=148),
}


class Model(NamedTuple):
    """One rank's part of a model, as far as time is concerned."""

    layers: int
    dim: int
    ranks: int
    form: str  # of the weights: bfloat16, int8, ...
    bytes: int  # of weights that one pass reads
    weights: int  # numbers among them
    position_bytes: int  # of keys and values, for each position
    kv_heads: int
    groups: int  # query heads to a key head
    attention: int  # multiplications for each token and position


def model_of(config: Config, ranks: int, quantization: str) -> Model:
    """Counted on the program's own modules, in bfloat16 or as quantized. Raises UserError where it doesn't divide."""
    model = unloaded_model(config, quantization, torch.bfloat16, Ranks(0, ranks))
    local = model.local
    per_layer = config.dim * (local.n_heads + 2 * local.n_kv_heads) * local.head_dim + local.n_heads * local.head_dim * config.dim
    per_layer += 3 * config.dim * local.ffn_dim
    return Model(
        config.n_layers, config.dim, ranks, "bfloat16" if quantization == "none" else quantization, model.weight_bytes(),
        config.n_layers * per_layer + local.vocab_size * config.dim, model.position_bytes(), local.n_kv_heads,
        local.n_heads // local.n_kv_heads, 2 * config.n_layers * local.n_heads * local.head_dim,
    )  # fmt: skip


def find_model(name: str, ranks: int, quantize: str, context: int) -> Model:
    """A shape's or a checkpoint's. Raises UserError for what it can't be: quantized twice, shorter than the context."""
    config, folder = find_shape(name)
    if folder is not None:
        quantize = checkpoint.form_of(folder, checkpoint.open_source(folder, config).quantization, quantize)
    if context > config.max_seq_len:
        raise UserError(f"--context is {context}; {name} has room for {config.max_seq_len}")
    return model_of(config, ranks, quantize)


def pass_terms(m: Model, machine: Machine, T: int, context: int) -> dict[str, float]:
    """Milliseconds of one pass over T tokens behind ``context`` others, by what they are spent on."""
    positions = bucket_of(context + T)
    multiplied = 2 * T * (m.weights + positions * m.attention)
    by_bytes, by_flops = m.bytes / (machine.bandwidth * machine.efficiency), multiplied / machine.flops
    attention = attention_of(m, machine, T, context)
    if machine.measured:
        seconds = between(machine.measured, T)
        by_bytes, by_flops, attention = m.bytes * seconds, 0.0, m.position_bytes * positions * seconds
    terms = {
        "bytes": by_bytes,
        "arithmetic": by_flops if machine.cpu else max(0.0, by_flops - by_bytes),
        "attention": attention,
        "kernels": (KERNELS_A_LAYER * m.layers + KERNELS_A_PASS) * machine.kernel_us * 1e-6,
        "collectives": collectives(m, machine, T) if m.ranks > 1 else 0.0,
    }
    return {name: 1e3 * seconds for name, seconds in terms.items()}


def attention_of(m: Model, machine: Machine, T: int, context: int) -> float:
    """Seconds of a pass's attention over T tokens behind ``context`` others, by the fastest way, as the program would choose it."""
    length, bucket = context + T, bucket_of(context + T)
    once = m.position_bytes * bucket / (machine.bandwidth * machine.efficiency)  # by all of the device
    if machine.cpu:
        return once
    sdpa = max(once, m.position_bytes * bucket / (m.kv_heads * PROGRAM_BANDWIDTH))
    if machine.attention == "sdpa" or T > MOST_TOKENS:
        return sdpa
    plans = plans_for(m.kv_heads, m.groups * T, bucket, machine.processors)
    return min(sdpa, *(divided_attention(m, machine, m.groups * T, length, plan, plan.share(bucket)) for plan in plans))


def divided_attention(m: Model, machine: Machine, rows: int, length: int, plan: Plan, share: int) -> float:
    """Seconds of a pass's attention by the kernel: of each key head's ``rows`` over a text of ``length``, ``share`` keys a part."""
    key = m.position_bytes / (m.layers * m.kv_heads)  # with its value, in one layer
    parts, blocks = -(-length // share), -(-rows // plan.block_r)
    reading = max(
        min(share, length) * key / PROGRAM_BANDWIDTH,
        blocks * length * key * m.kv_heads / (machine.bandwidth * machine.efficiency),
    )
    sums = parts * min(rows, plan.block_r) * key  # a row's in fp32 take as much as a key and a value in 16 bits
    return m.layers * (reading + (EXCHANGE_US * 1e-6 + sums / PROGRAM_BANDWIDTH if parts > 1 else 0.0))


def collectives(m: Model, machine: Machine, T: int) -> float:
    """Seconds of a pass's sums over the ranks, as ``tp.sum_ranks`` goes about them, and of the exchange of maxima, NCCL's."""
    message, nccl = 2 * T * m.dim, COLLECTIVE_US["nccl"] * 1e-6
    if machine.collective == "symmetric" and message <= SMALL_BYTES:
        one = COLLECTIVE_US["symmetric"] * 1e-6 + (m.ranks - 1) * message / machine.link  # each rank reads all the others' parts
    else:
        one = nccl + 2 * (m.ranks - 1) / m.ranks * message / machine.link
    return (2 * m.layers + 1) * one + nccl


def mean_accepted(chance: float, M: int) -> float:
    """m* where each drafted token is accepted with this chance after those before it."""
    return sum(chance**i for i in range(1, M + 1))


def chance_for(accepted: float, M: int) -> float:
    """The chance at which a block of M gives this m*."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_accepted(middle, M) < accepted else (low, middle)
    return (low + high) / 2


def acceptance_curve(text: str, M: int) -> list[float]:
    """m* for blocks of 1, 2, ... LONGEST_BLOCK tokens, from what follows --acceptance.

    A number is m* at M, and a drafted token's chance is taken to be the same everywhere. FILE:RULE is a curve that accept.py
    measured, continued by its last step's chance.

    Raises:
        UserError: it is neither, or more than M.
    """
    try:
        accepted = float(text)
    except ValueError:
        return measured_curve(text)
    if not 0 <= accepted <= M:
        raise UserError(f"--acceptance is {accepted:g}; a block of {M} drafted tokens gives from 0 to {M}")
    chance = chance_for(accepted, M)
    return [mean_accepted(chance, m) for m in range(1, LONGEST_BLOCK + 1)]


def measured_curve(text: str) -> list[float]:
    try:
        lines = Path(next(name for name, _ in splits(text) if Path(name).is_file())).read_text(encoding="utf-8").splitlines()
        rules = json.loads(lines[-1])["rules"]
        curve = [float(x) for x in next(rules[rule] for _, rule in splits(text) if rule in rules)["mean_accepted"]]
        steps = [b - a for a, b in zip([0.0, *curve], curve, strict=False)]
        last = steps[-1]
        chance = min(1.0, last / steps[-2]) if len(steps) > 1 and steps[-2] > 0 else 0.0
    except (OSError, ValueError, KeyError, IndexError, TypeError, StopIteration):
        raise UserError(f"--acceptance is {text!r}; give m* as a number, or FILE:RULE with what accept.py --json printed") from None
    while len(curve) < LONGEST_BLOCK:
        last *= chance
        curve.append(curve[-1] + last)
    return curve


def splits(text: str) -> list[tuple[str, str]]:
    """``FILE:RULE`` at each of its colons: a rule may hold one too."""
    parts = text.split(":")
    return [(":".join(parts[:i]), ":".join(parts[i:])) for i in range(1, len(parts))]


class Forecast(NamedTuple):
    """A round of M, in milliseconds."""

    M: int
    draft: dict[str, float]  # a step, by term
    verify: dict[str, float]
    other_ms: float
    tokens: float  # a round commits
    bound_ms: float

    @property
    def draft_ms(self) -> float:
        return sum(self.draft.values())

    @property
    def verify_ms(self) -> float:
        return sum(self.verify.values())

    @property
    def round_ms(self) -> float:
        return self.M * self.draft_ms + self.verify_ms + self.other_ms

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.tokens / self.round_ms


def forecast(target: Model, draft: Model | None, machine: Machine, M: int, accepted: float, context: int) -> Forecast:
    """A round of M drafted tokens of which ``accepted`` are taken; without a draft, M and that are 0."""
    bound = (target.bytes + context * target.position_bytes) / machine.bandwidth
    if draft is not None:
        bound += M * (draft.bytes + context * draft.position_bytes) / machine.bandwidth
    other = KERNELS_A_ROUND * machine.kernel_us * 1e-3 if M else 0.0
    if target.ranks > 1:
        other += COLLECTIVE_US["nccl"] * 1e-3  # rank 0's word
    return Forecast(
        M, pass_terms(draft, machine, 1, context) if draft is not None else {}, pass_terms(target, machine, M + 1, context),
        other, 1 + accepted, 1e3 * bound,
    )  # fmt: skip


def calibrated(machine: Machine, path: Path, forms: set[str]) -> Machine:
    """The machine with seconds for each byte as benchmark.py measured them.

    Two models at one token tell what a layer costs beside its bytes; with one model that stays as it was.

    Args:
        forms: of the weights to forecast.

    Raises:
        UserError: the file holds no benchmark, or one of another kind of device or form of weights.
    """
    try:
        said = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
        points = [(int(p["rows"]), p["ms"] / 1e3, float(p["read_bytes"]), int(p["layers"])) for p in said["passes"]]
        form = said["dtype"] if said["quantize"] == "none" else said["quantize"]
        on_cpu, bandwidth = said["machine"]["device"] == "cpu", 1e9 * float(said["machine"]["read_gb_s"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        raise UserError(f"--calibrate {path} doesn't end in what benchmark.py --json printed") from None
    if not points or min(p[2] for p in points) <= 0:
        raise UserError(f"--calibrate {path} holds no pass that read anything")
    if on_cpu != machine.cpu:
        raise UserError(f"--calibrate {path} was measured on {said['machine']['device']}, not on --gpu {machine.name}")
    if forms != {form}:
        raise UserError(f"--calibrate {path} was measured with weights in {form}; the forecast is for {', '.join(sorted(forms))}")
    timed = [(rows, seconds, size, KERNELS_A_LAYER * layers + KERNELS_A_PASS) for rows, seconds, size, layers in points]
    single = sorted((p for p in timed if p[0] == 1), key=lambda p: p[2])
    if len(single) > 1:
        (_, t1, b1, k1), (_, t2, b2, k2) = single[0], single[-1]
        determinant = b1 * k2 - b2 * k1
        if abs(determinant) > 1e-3 * b1 * k2:
            machine = replace(machine, kernel_us=max(0.0, 1e6 * (b1 * t2 - b2 * t1) / determinant))
    measured: dict[int, list[float]] = {}
    for rows, seconds, size, kernels in timed:
        measured.setdefault(rows, []).append(max(0.0, seconds - kernels * machine.kernel_us * 1e-6) / size)
    return replace(machine, bandwidth=bandwidth, measured={rows: sum(found) / len(found) for rows, found in measured.items()})


# who says so, target, its bits, GPU, ranks, tokens/s; 8B: Llama-3.1
PUBLISHED = [
    ("gpt-fast README", "llama-3.1-8b", "none", "a100", 1, 94.0), ("gpt-fast README", "llama-3.1-8b", "int8", "a100", 1, 138.0),
    ("gpt-fast README", "llama-3.1-8b", "none", "a100", 8, 276.0), ("gpt-fast README", "llama-3.1-70b", "none", "a100", 2, 16.0),
    ("gpt-fast README", "llama-3.1-70b", "none", "a100", 4, 37.0),
    ("gpt-fast README", "llama-3.1-70b", "none", "a100", 8, 59.0), ("gpt-fast README", "llama-3.1-70b", "int8", "a100", 8, 76.0),
    ("gpt-fast README", "llama-3.1-405b", "int8", "a100", 8, 15.6), ("gpt-fast PR 158", "llama-3.1-8b", "none", "h100", 1, 165.0),
    ("SGLang docs", "llama-3.1-8b", "none", "h100", 1, 158.0), ("NVIDIA NIM docs, fp8", "llama-3.1-70b", "int8", "h100", 2, 52.0),
    ("NVIDIA blog, fp8", "llama-3.1-405b", "int8", "h200", 4, 33.5),
    ("Judge Decoding, plain", "llama-3.1-405b", "int8", "h100", 8, 33.0),
]  # fmt: skip


# the paper's judge, drafted by 8B; the 70B's m* isn't published and is a guess
JUDGED = [("llama-3.1-405b", 8, 19.7, 129.0), ("llama-3.1-70b", 2, 18.0, 141.0)]


def check_published() -> dict[str, Any]:
    """Forecasts of plain decoding beside what others measured with their own programs."""
    print("| source | model | weights | GPUs | measured tokens/s | forecast | forecast / measured |", file=sys.stderr)
    print("| --- | --- | --- | --- | ---: | ---: | ---: |", file=sys.stderr)
    rows = []
    for source, name, kept, gpu, ranks, measured in PUBLISHED:
        found = forecast(model_of(shape(name), ranks, kept), None, GPUS[gpu], 0, 0.0, 1024).tokens_per_s
        rows.append({"source": source, "model": name, "quantize": kept, "gpu": gpu, "ranks": ranks, "measured": measured,
                     "forecast": found})  # fmt: skip
        print(f"| {source} | {name} | {'bf16' if kept == 'none' else kept} | {ranks} × {gpu} | {measured:g} | {found:.1f} | "
              f"{found / measured:.2f} |", file=sys.stderr)  # fmt: skip
    for name, ranks, accepted, measured in JUDGED:
        target, draft = (model_of(shape(model), ranks, "int8") for model in (name, "llama-3.1-8b"))
        found = forecast(target, draft, GPUS["h100"], 25, accepted, 1024).tokens_per_s
        rows.append({"source": "Judge Decoding", "model": name, "ranks": ranks, "measured": measured, "forecast": found})
        print(f"| Judge Decoding, 8B, m* {accepted:g} | {name} | int8 | {ranks} × h100 | {measured:g} | {found:.1f} | "
              f"{found / measured:.2f} |", file=sys.stderr)  # fmt: skip
    return {"published": rows}


def report(name: str, f: Forecast, machine: Machine) -> list[str]:
    """Terms of a forecast as Markdown."""
    lines = [f"### {name}", "", "| ms | a draft step | the verify pass |", "| --- | ---: | ---: |"]
    lines += [f"| {term} | {f.draft.get(term, 0.0):.3f} | {f.verify[term]:.3f} |" for term in f.verify]
    lines += [f"| **all** | **{f.draft_ms:.3f}** | **{f.verify_ms:.3f}** |", ""]
    lines.append(
        f"a round: {f.M} × {f.draft_ms:.3f} + {f.verify_ms:.3f} + {f.other_ms:.3f} = {f.round_ms:.2f} ms for {f.tokens:.1f} "
        f"tokens: {f.tokens_per_s:.0f} tokens/s on {machine.name}; bound by bytes alone: {1e3 * f.tokens / f.bound_ms:.0f}"
    )
    return lines


def binding(f: Forecast) -> str:
    """The term that most of a round goes to."""
    total = {f"draft {term}": f.M * ms for term, ms in f.draft.items()} | {f"verify {term}": ms for term, ms in f.verify.items()}
    return max(total, key=lambda name: total[name])


def summary(name: str, f: Forecast) -> dict[str, Any]:
    return {
        "draft": name, "draft_len": f.M, "draft_ms": f.draft_ms, "verify_ms": f.verify_ms, "other_ms": f.other_ms,
        "round_ms": f.round_ms, "tokens_per_round": f.tokens, "tokens_per_s": f.tokens_per_s,
        "bound_tokens_per_s": 1e3 * f.tokens / f.bound_ms, "binds": binding(f),
        "terms": {"draft": f.draft, "verify": f.verify},
    }  # fmt: skip


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    add("--target", default="llama-3.1-405b", metavar="NAME", help="a shape, or a checkpoint (default: llama-3.1-405b)")
    add(
        "--draft",
        metavar="NAME[=M*]",
        nargs="+",
        help="the same, of the draft; several are compared, each with its own m* if given",
    )
    add("--gpu", choices=[*GPUS, "cpu"], default="h100", help="default: h100; cpu needs --bandwidth and --gflops, or --calibrate")
    add("--nproc", type=int, default=1, metavar="N", help="ranks (default: 1)")
    add("--quantize", choices=["none", *MODES], default="none", help="weights of both models (default: none, bfloat16)")
    add("--draft-quantize", choices=["none", *MODES], help="of the draft alone")
    add("--draft-tp", type=int, choices=[1], help="1: each rank holds the whole draft")
    add("--draft-len", type=int, default=25, metavar="M", help="tokens drafted a round (default: 25)")
    add(
        "--acceptance",
        metavar="M*|FILE:RULE",
        help="accepted drafted tokens a round at --draft-len, or a curve from accept.py --json",
    )
    add("--context", type=int, default=1024, metavar="N", help="tokens of text read by attention (default: 1024)")
    add(
        "--search",
        action="store_true",
        help=f"find the best M of 1 to {LONGEST_BLOCK} for each draft, and whether to divide the draft over the ranks",
    )
    add("--collective", choices=COLLECTIVE_US, help="how small sums go over the ranks (default: symmetric; nccl on the A100)")
    add("--attention", choices=["divided", "sdpa"], help="by our kernel, or by PyTorch's (default: divided)")
    add("--efficiency", type=float, metavar="X", help="share of the memory's bandwidth that kernels reach (default: 0.85)")
    add("--kernel-us", type=float, metavar="US", help="microseconds that a kernel costs beside its bytes (default: 2)")
    add("--bandwidth", type=float, metavar="GB/S", help="the memory's, in place of the table's")
    add("--gflops", type=float, metavar="X", help="arithmetic in GFLOP/s, in place of the table's")
    add("--calibrate", type=Path, metavar="FILE", help="what benchmark.py --json printed on the machine")
    add("--check", action="store_true", help="compare forecasts of plain decoding with published figures, and end")
    add("--json", action="store_true", help="end stdout with one JSON object; the tables go to stderr")
    args = p.parse_args(argv)
    for name in ("nproc", "context", "draft_len"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    if args.draft_len > LONGEST_BLOCK:
        raise UserError(f"--draft-len is {args.draft_len}; forecasts go up to {LONGEST_BLOCK}")
    for name in ("efficiency", "kernel_us", "bandwidth", "gflops"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise UserError(f"--{name.replace('_', '-')} is {value:g}; it must be above 0")
    if args.efficiency is not None and args.efficiency > 1:
        raise UserError(f"--efficiency is {args.efficiency:g}; it must be at most 1")
    without = {
        "--search": args.search,
        "--acceptance": args.acceptance,
        "--draft-quantize": args.draft_quantize,
        "--draft-tp": args.draft_tp,
    }
    given = [name for name, value in without.items() if value]
    if args.draft is None and given:
        raise UserError(f"{given[0]} needs a --draft")
    measured = [name for name in ("efficiency", "kernel_us", "gflops", "bandwidth") if getattr(args, name) is not None]
    if args.calibrate is not None and measured:
        raise UserError(f"--{measured[0].replace('_', '-')} has no meaning with --calibrate, which measured it")
    return args


def machine_of(args: argparse.Namespace) -> Machine:
    """The device that the options describe. Raises UserError for a CPU without its numbers."""
    if args.gpu == "cpu":
        if args.calibrate is None and (args.bandwidth is None or args.gflops is None):
            raise UserError("--gpu cpu needs its --bandwidth and --gflops, or --calibrate with what benchmark.py measured")
        if args.nproc > 1:
            raise UserError(f"--nproc {args.nproc} has no meaning with --gpu cpu: there is no model of sums between CPUs")
        machine = Machine("cpu", 1.0, 1.0, kernel_us=10.0, cpu=True)
    else:
        machine = GPUS[args.gpu]
    changes: dict[str, Any] = {"efficiency": args.efficiency, "kernel_us": args.kernel_us, "collective": args.collective,
                               "attention": args.attention}  # fmt: skip
    changes["bandwidth"] = None if args.bandwidth is None else 1e9 * args.bandwidth
    changes["flops"] = None if args.gflops is None else 1e9 * args.gflops
    return replace(machine, **{name: value for name, value in changes.items() if value is not None})


def split_draft(text: str) -> tuple[str, str | None]:
    """A draft's name, and the m* that may follow it."""
    name, _, accepted = text.partition("=")
    return name, accepted or None


def forecasts(args: argparse.Namespace, machine: Machine) -> list[tuple[str, Forecast]]:
    """A forecast for each draft, or the one of plain decoding. Raises UserError."""
    target = find_model(args.target, args.nproc, args.quantize, args.context)
    drafts: dict[str, tuple[str | None, list[Model]]] = {}
    for text in args.draft or []:
        name, own = split_draft(text)
        sharing = {1 if args.draft_tp == 1 else args.nproc} | ({1} if args.search else set())
        kept = args.draft_quantize or args.quantize
        drafts[name] = own or args.acceptance, [find_model(name, ranks, kept, args.context) for ranks in sharing]
    if args.calibrate is not None:
        machine = calibrated(machine, args.calibrate, {m.form for m in (target, *(m for _, ms in drafts.values() for m in ms))})
    if not drafts:
        return [("no draft", forecast(target, None, machine, 0, 0.0, args.context))]
    found = []
    for name, (accepted, models) in drafts.items():
        if accepted is None:
            raise UserError(f"--draft {name} needs its m*: give --acceptance M*, or --draft {name}=M*")
        curve = acceptance_curve(accepted, args.draft_len)
        lengths = range(1, LONGEST_BLOCK + 1) if args.search else [args.draft_len]
        every = [
            (f"{name} on {m.ranks}" if m.ranks > 1 else name, forecast(target, m, machine, M, curve[M - 1], args.context))
            for m in models
            for M in lengths
        ]
        found.append(max(every, key=lambda pair: pair[1].tokens_per_s))
    return sorted(found, key=lambda pair: -pair[1].tokens_per_s)


def main() -> None:
    args = parse_args()
    if args.check:
        if len(sys.argv) > 2 + args.json:
            raise UserError("--check takes no other options: its forecasts are all by the same assumptions")
        said: dict[str, Any] = check_published()
    else:
        machine = machine_of(args)
        found = forecasts(args, machine)
        lines = [line for name, f in found for line in [*report(f"{args.target} with {name}", f, machine), ""]]
        print("\n".join(lines[:-1]), file=sys.stderr if args.json else sys.stdout)
        said = summary(*found[0]) | {"machine": machine.name, "ranks": args.nproc, "target": args.target}
        said["others"] = [summary(*other) for other in found[1:]]
    if args.json:
        print(json.dumps(said))


if __name__ == "__main__":
    run_cli(main)
