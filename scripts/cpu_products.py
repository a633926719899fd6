"""A layer's products on this CPU: our loops (native.cpp) against PyTorch's, for each form of weight and number of rows.

Each is run on weights that lie in memory, not in the caches, ours and PyTorch's in turn; medians.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

import torch
from benchmark import bandwidth_meter
from kernel_report import products
from shapes import ROWS, shape

import native
from linear import cold_seconds, torch_linear

FORMS = {
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "int8": (torch.bfloat16, torch.int8),
    "float32": (torch.float32, torch.float32),
}


def measure(name: str, form: str, rows: list[int], repeat: int) -> list[dict[str, Any]]:
    """Every product of a layer but the output projection, whose shape brings nothing new."""
    x_dtype, w_dtype = FORMS[form]
    found = []
    for product, (N, K) in products(shape(name), 1).items():
        if product == "output":
            continue
        weight = torch.randint(-127, 128, (N, K), dtype=torch.int8) if w_dtype == torch.int8 else torch.randn(N, K).to(w_dtype)
        scale = torch.rand(N) / 127 if w_dtype == torch.int8 else None
        for T in rows:
            x = torch.randn(T, K).to(x_dtype)
            ours, theirs = cold_seconds((native.few_rows, torch_linear), (x, weight, scale, None), repeat + 1)
            times = {"ours": statistics.median(ours[1:]), "pytorch": statistics.median(theirs[1:])}  # the first warms up
            found.append({"product": product, "N": N, "K": K, "form": form, "rows": T, **times, "bytes": weight.nbytes})
    return found


def layer_rows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A whole layer's sums, by form and number of rows."""
    sums: dict[tuple[str, int], dict[str, Any]] = {}
    for row in found:
        total = sums.setdefault((row["form"], row["rows"]), {"ours": 0.0, "pytorch": 0.0, "bytes": 0, "multiplied": 0})
        for key in ("ours", "pytorch", "bytes"):
            total[key] += row[key]
        total["multiplied"] += 2 * row["rows"] * row["N"] * row["K"]
    return [{"form": form, "rows": T, **total} for (form, T), total in sums.items()]


def main() -> None:
    p = Parser(description=__doc__)
    p.add_argument("shape", nargs="?", default="qwen2.5-1.5b", metavar="SHAPE", help="a known model (default: qwen2.5-1.5b)")
    p.add_argument("--rows", type=int, nargs="+", default=[1, 2, 9, 17, 26], metavar="T", help="rows of x (default: 1 2 9 17 26)")
    p.add_argument("--forms", nargs="+", choices=FORMS, default=["bfloat16", "int8"], help="of weights (default: bfloat16 int8)")
    p.add_argument("--repeat", type=int, default=7, metavar="N", help="default: 7")
    p.add_argument("--json", action="store_true", help="end stdout with one JSON object; the table goes to stderr")
    args = p.parse_args()
    if args.shape not in ROWS:
        raise UserError(f"{args.shape} is no known shape; there are {', '.join(ROWS)}")
    if min(args.rows) < 1 or max(args.rows) > native.MOST_ROWS or args.repeat < 1:
        raise UserError(f"--rows must be from 1 to {native.MOST_ROWS}, --repeat at least 1")
    if native.library() is None:
        raise UserError("there is no C++ compiler here, so PyTorch's products are the only ones")
    bandwidth = bandwidth_meter(torch.device("cpu"))(7)
    found = [row for form in args.forms for row in measure(args.shape, form, args.rows, args.repeat)]
    out = sys.stderr if args.json else sys.stdout
    print(f"{args.shape}, a layer's four products, {torch.get_num_threads()} threads, {bandwidth / 1e9:.1f} GB/s read", file=out)
    print("| weights | rows | ours, ms | GB/s | GFLOP/s | PyTorch, ms | PyTorch / ours |", file=out)
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |", file=out)
    for r in layer_rows(found):
        ours, theirs = r["ours"], r["pytorch"]
        speeds = f"{r['bytes'] / ours / 1e9:.1f} | {r['multiplied'] / ours / 1e9:.0f}"
        print(f"| {r['form']} | {r['rows']} | {1e3 * ours:.2f} | {speeds} | {1e3 * theirs:.2f} | {theirs / ours:.2f} |", file=out)
    if args.json:
        print(json.dumps({"threads": torch.get_num_threads(), "read_gb_s": bandwidth / 1e9, "products": found}))


if __name__ == "__main__":
    run_cli(main)
