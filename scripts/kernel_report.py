"""What the Triton kernel becomes for an H100: compiled for sm_90 on any machine, for every product of a model's layers.

For each: how it is cut up, what it moves over what it must move, whether it multiplies by wgmma, its shared memory, registers
and spills. Needs Triton (pip install triton) and no GPU.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

from shapes import ROWS, shape

from linear import JUDGE_ROWS
from model import Config
from tp import check_divides, local_config

PROCESSORS = 132  # of an H100 or H200
POINTERS = {"x": "bf16", "weight": "i8", "scale": "fp32", "bias": "fp32", "out": "bf16", "sums": "fp32", "arrived": "i32"}


def products(config: Config, size: int) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of every product of one of ``size`` ranks."""
    check_divides(config, size, "this model")
    mine = local_config(config, size)
    return {
        "wqkv": ((mine.n_heads + 2 * mine.n_kv_heads) * config.head_dim, config.dim),
        "wo": (config.dim, mine.n_heads * config.head_dim),
        "w13": (2 * mine.ffn_dim, config.dim),
        "w2": (config.dim, mine.ffn_dim),
        "output": (mine.vocab_size + JUDGE_ROWS, config.dim),
    }


def compiled(T: int, N: int, K: int, plan: Any) -> dict[str, int]:
    """Compile a product for sm_90 and read what became of it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    import kernels

    constants = {"BLOCK_T": kernels.block_t(T), "BLOCK_N": plan.block_n, "BLOCK_K": plan.block_k, "SPLIT": plan.split,
                 "HAS_BIAS": False}  # fmt: skip
    names = kernels.int8_rows.arg_names
    sizes = {"T": T, "N": N, "K": K, "share": plan.block_k}
    signature = {name: f"*{POINTERS[name]}" if name in POINTERS else "i32" if name in sizes else "constexpr" for name in names}
    aligned = [name for name in names if name in POINTERS or sizes.get(name, 1) % 16 == 0]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernels.int8_rows, signature, {(names.index(k),): v for k, v in constants.items()}, attributes)
    options = {"num_warps": plan.warps, "num_stages": plan.stages}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = made.asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    return {
        "wgmma": ptx.count("wgmma.mma_async"), "mma": len(re.findall(r"\bmma\.sync", ptx)), "shared": made.metadata.shared,
        "registers": int(used[1]) if used else 0, "spilled": int(spilled[1]) if spilled else 0,
    }  # fmt: skip


HEADS = ("model", "ranks", "product", "outputs", "inputs", "rows", "tile", "parts", "moved / least", "wgmma", "mma", "shared kB",
         "registers", "spilled bytes")  # fmt: skip


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--models", default="llama-3.1-8b,llama-3.1-70b,llama-3.1-405b", metavar="LIST", help="shapes")
    parser.add_argument("--nproc", default="1,2,8", metavar="LIST", help="ranks (default: 1,2,8)")
    parser.add_argument("--rows", default="1,2,26", metavar="LIST", help="rows of x (default: 1,2,26)")
    parser.add_argument("--json", action="store_true", help="end stdout with one JSON object; the table goes to stderr")
    args = parser.parse_args()
    try:
        import kernels
    except ImportError:
        raise UserError("this needs Triton: pip install triton") from None
    unknown = [name for name in args.models.split(",") if name not in ROWS]
    if unknown:
        raise UserError(f"--models names {unknown[0]!r}; known shapes are {', '.join(ROWS)}")
    out, rows = sys.stderr if args.json else sys.stdout, []
    print(f"| {' | '.join(HEADS)} |\n{'| --- ' * len(HEADS)}|", file=out)
    for name in args.models.split(","):
        for size in map(int, args.nproc.split(",")):
            for product, (N, K) in products(shape(name), size).items():
                for T in map(int, args.rows.split(",")):
                    plan = kernels.plan_for(N, K, PROCESSORS)
                    least, moved = kernels.bytes_moved(T, N, K, plan)
                    found = compiled(T, N, K, plan)
                    rows.append({"model": name, "ranks": size, "product": product, "outputs": N, "inputs": K, "rows": T,
                                 "plan": plan._asdict(), "moved_over_least": moved / least, **found})  # fmt: skip
                    tile = f"{plan.block_n}x{plan.block_k}"
                    cells = (name, size, product, N, K, T, tile, plan.split, f"{moved / least:.2f}", found["wgmma"], found["mma"],
                             f"{found['shared'] / 1e3:.0f}", found["registers"], found["spilled"])  # fmt: skip
                    print(f"| {' | '.join(map(str, cells))} |", file=out, flush=True)
    if args.json:
        print(json.dumps({"products": rows, "spilled": sum(row["spilled"] for row in rows)}))


if __name__ == "__main__":
    run_cli(main)
