"""What each rank will hold, before anyone downloads a byte: weights, KV caches, buffers, and whether it fits.

Weights, caches and buffers are counted on the program's own modules, built without memory, so they are exact. Two lines are
estimates: working memory, from the largest tensors that live at once, and what the CUDA runtime and NCCL take for themselves.

With --load the checkpoints are loaded, under torchrun by as many ranks as it starts, and what each rank then holds, and the most
it held on the way, stand beside the plan.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

import torch
from shapes import find_shape

import checkpoint
from engine import cache_length
from linear import JUDGE_ROWS, MODES
from model import PREFILL_CHUNK, Cache, Config, Transformer
from tp import Ranks, default_device, gather_objects, ranks_of, together

GPUS = {"80 GB (H100, A100)": 80e9, "141 GB (H200)": 141e9, "180 GB (B200)": 180e9}
RUNTIME_BYTES = 2_500_000_000  # CUDA context, cuBLAS workspaces, NCCL buffers: an estimate


class Part(NamedTuple):
    """A model as one rank holds it."""

    weights: int
    cache: int
    working: int


def weight_bytes(config: Config, ranks: Ranks, quantization: str, dtype: torch.dtype, judge: bool = False) -> int:
    """Bytes of one rank's weights as ``checkpoint.load_model`` leaves them, with a judge's rows where asked for."""
    with torch.device("meta"):
        model = Transformer(config, ranks, quantization)
    total = 0
    for name, p in model.named_parameters():
        # int4's scales are brought to the model's dtype, int8's stay in fp32
        fixed = not p.is_floating_point() or (name.endswith(".scale") and p.dtype == torch.float32)
        total += p.numel() * (p.element_size() if fixed else dtype.itemsize)
    row = config.dim * dtype.itemsize if quantization == "none" else config.dim + 4
    return total + (JUDGE_ROWS * row if judge else 0)


def part(config: Config, ranks: Ranks, quantization: str, dtype: torch.dtype, length: int, rows: int, judge: bool) -> Part:
    """One rank's part of a model, with a cache of ``length`` positions, reading at most ``rows`` tokens at once in a round."""
    with torch.device("meta"):
        model = Transformer(config, ranks, quantization)
        local = model.local
        cache = Cache(local, length, dtype, "meta")
    logits = 3 * rows * (local.vocab_size + JUDGE_ROWS) * 4  # in the model's dtype, in fp32, and one copy more
    wide = max(2 * local.ffn_dim, (local.n_heads + 2 * local.n_kv_heads) * local.head_dim)
    prefill = PREFILL_CHUNK * (4 * config.dim + 3 * wide) * max(dtype.itemsize, 4)
    widened = max(p.numel() for p in model.parameters() if p.dtype == torch.int8) * dtype.itemsize if quantization == "int8" else 0
    return Part(
        weight_bytes(config, ranks, quantization, dtype, judge),
        sum(t.nbytes for t in (cache.k, cache.v, cache.cos, cache.sin)),
        max(logits, prefill, widened),
    )


def plan(args) -> dict[str, int]:
    """Bytes a rank holds, by what they are for. Raises UserError where the models don't divide, or their context is too short."""
    ranks, dtype, M = Ranks(0, args.nproc), checkpoint.DTYPES[args.dtype], args.draft_len if args.draft else 0
    names = {"target": args.target} | ({"draft": args.draft} if args.draft else {})
    found = {who: find_shape(name) for who, name in names.items()}
    room = min(config.max_seq_len for config, _ in found.values())
    context = min(8192, room) if args.context is None else args.context
    if context > room:
        raise UserError(f"--context is {context}; there is room for {room}")
    length = cache_length(context, M, 1)
    rows: dict[str, Any] = {}
    for who, (config, folder) in found.items():
        kept = args.quantize
        if folder is not None:
            kept = checkpoint.form_of(folder, checkpoint.open_source(folder, config).quantization, kept)
        mine = ranks if who == "target" or args.draft_tp != 1 else Ranks()
        p = part(config, mine, kept, dtype, length, M + 1, who == "target" and M > 0)
        rows |= {f"{who}: weights": p.weights, f"{who}: KV cache": p.cache}
        rows["working memory (estimate)"] = max(rows.get("working memory (estimate)", 0), p.working)
        if who == "target":
            rows["buffers"] = (length + 1) * 8 + (3 * M + 2) * 8 + M * config.vocab_size * 4
    rows["CUDA and NCCL (estimate)"] = RUNTIME_BYTES
    return rows


class Loaded(NamedTuple):
    """What loading took of one rank; bytes above what the process had before."""

    seconds: float
    weights: int  # of tensors, each counted once
    caches: int
    peak: int  # resident; on CUDA, allocated on the device


def load(args, pair: checkpoint.Pair, context: int) -> Loaded:
    """Load the models as an engine does, as one of the ranks, and measure."""
    cuda = args.device == "cuda"
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    start = time.perf_counter()
    models = pair.load(checkpoint.DTYPES[args.dtype], args.device, args.quantize, args.draft_tp == 1)
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if cuda else max(0, checkpoint.peak_memory() - resident)
    tensors = {p.data_ptr(): p.nbytes for model in models if model is not None for p in model.parameters()}
    M = args.draft_len if args.draft else 0
    caches = [model.new_cache(cache_length(context, M, 1)) for model in models if model is not None]
    held = sum(t.nbytes for cache in caches for t in (cache.k, cache.v, cache.cos, cache.sin))
    return Loaded(seconds, sum(tensors.values()), held, peak)


def loaded_table(rows: dict[str, int], found: list[Loaded]) -> str:
    """The ranks beside the plan, as Markdown."""
    planned = sum(size for name, size in rows.items() if name.endswith("weights"))
    cache = sum(size for name, size in rows.items() if name.endswith("KV cache"))
    heads = ("rank", "weights, planned GB", "held", "caches, planned GB", "held", "most while loading", "over the plan", "seconds")
    lines = [f"| {' | '.join(heads)} |", "| ---: " * len(heads) + "|"]
    for rank, r in enumerate(found):
        over = f"{100 * (r.peak / planned - 1):+.1f} %"
        lines.append(f"| {rank} | {planned / 1e9:.3f} | {r.weights / 1e9:.3f} | {cache / 1e9:.3f} | {r.caches / 1e9:.3f} | "
                     f"{r.peak / 1e9:.3f} | {over} | {r.seconds:.1f} |")  # fmt: skip
    return "\n".join(lines)


def parse_args():
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", required=True, metavar="NAME", help="a shape such as llama-3.1-405b, or a checkpoint")
    p.add_argument("--draft", metavar="NAME", help="the same, of the draft")
    p.add_argument("--quantize", choices=["none", *MODES], default="none", help="weights of both models (default: none)")
    p.add_argument("--nproc", type=int, metavar="N", help="ranks (default: 1; with --load those that torchrun starts)")
    p.add_argument("--load", action="store_true", help="load the checkpoints and measure, too")
    p.add_argument(
        "--device", choices=["cuda", "cpu"], default=default_device(), help="for --load (default: cuda where there is one)"
    )
    p.add_argument("--draft-tp", type=int, choices=[1], help="1: each rank holds the whole draft")
    p.add_argument(
        "--context", type=int, metavar="N", help="tokens of prompt and answer (default: the models' context, at most 8192)"
    )
    p.add_argument("--draft-len", type=int, default=25, metavar="M", help="tokens drafted a round (default: 25)")
    p.add_argument("--dtype", choices=list(checkpoint.DTYPES), default="bfloat16", help="default: bfloat16")
    p.add_argument("--json", action="store_true", help="end stdout with one JSON object; the table goes to stderr")
    args = p.parse_args()
    for name in ("nproc", "context", "draft_len"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    if args.load and args.nproc is not None:
        raise UserError(f"--nproc {args.nproc} has no meaning with --load; start as many ranks with torchrun --nproc_per_node")
    args.nproc = args.nproc or 1
    return args


def main() -> None:
    args = parse_args()
    if not args.load:
        return show(args, plan(args), [])
    with ranks_of(args.device) as ranks:
        with together():
            args.nproc = ranks.size
            rows = plan(args)
            pair = checkpoint.find_pair(args.target, args.draft)
            context = min(8192, pair.context) if args.context is None else args.context
        found = gather_objects(load(args, pair, context))
        if ranks.rank == 0:
            show(args, rows, found)


def show(args, rows: dict[str, int], found: list[Loaded]) -> None:
    """Print the plan, and beside it what loading found."""
    total = sum(rows.values())
    lines = ["| each rank holds | GB |", "| --- | ---: |"]
    lines += [f"| {name} | {size / 1e9:.2f} |" for name, size in rows.items() if size]
    lines += [f"| **total** | **{total / 1e9:.2f}** |", ""]
    for gpu, room in GPUS.items():
        lines.append(f"{gpu}: " + (f"fits, {(room - total) / 1e9:.1f} GB to spare" if total <= room else
                                   f"does NOT fit, {(total - room) / 1e9:.1f} GB too much"))  # fmt: skip
    if found:
        lines += ["", loaded_table(rows, found)]
    print("\n".join(lines), file=sys.stderr if args.json else sys.stdout)
    if args.json:
        fits = {gpu: total <= room for gpu, room in GPUS.items()}
        print(json.dumps({"bytes": rows, "total_bytes": total, "fits": fits, "ranks": [r._asdict() for r in found]}))


if __name__ == "__main__":
    run_cli(main)
