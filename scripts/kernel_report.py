"""What the Triton kernels become for an H100: compiled for sm_90 on any machine, for a model's attention and every product of it.

For each: how it is cut up, what it moves over what it must move, whether it multiplies by wgmma or mma, its shared memory,
registers and spills. Needs Triton (pip install triton) and no GPU.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

from shapes import ROWS, shape

import attention
from linear import JUDGE_ROWS
from model import Cache, Config
from tp import check_divides, local_config

PROCESSORS = 132  # of an H100 or H200
SUMS = {"out": "*bf16", "sums": "*fp32", "arrived": "*i32"}
PRODUCT = SUMS | {"x": "*bf16", "weight": "*i8", "scale": "*fp32", "bias": "*fp32"}  # the kernels' arguments, but for whole numbers
ATTENTION = SUMS | {"q": "*bf16", "k": "*bf16", "v": "*bf16", "positions": "*i64", "scale": "fp32"}


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


def compiled(kernel: Any, types: dict[str, str], sizes: dict[str, int], constants: dict[str, int], plan: Any) -> dict[str, int]:
    """Compile a kernel for sm_90, as Triton does for arguments of these ``types`` and ``sizes``, and read what became of it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    constants = constants | {name: 1 for name, size in sizes.items() if size == 1}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [name for name in names if types.get(name, "").startswith("*") or sizes.get(name, 1) % 16 == 0]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, attributes)
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


def product_rows(name: str, size: int, T: int, bucket: int) -> Iterator[dict[str, Any]]:
    """What becomes of every product of T rows. ``bucket`` is attention's."""
    import kernels

    for product, (N, K) in products(shape(name), size).items():
        plan = kernels.plan_for(N, K, PROCESSORS)
        least, moved = kernels.bytes_moved(T, N, K, plan)
        share = -(-K // (plan.block_k * plan.split)) * plan.block_k
        constants = {"BLOCK_T": kernels.block_t(T), "BLOCK_N": plan.block_n, "BLOCK_K": plan.block_k, "SPLIT": plan.split,
                     "HAS_BIAS": False}  # fmt: skip
        found = compiled(kernels.int8_rows, PRODUCT, {"T": T, "N": N, "K": K, "share": share}, constants, plan)
        yield {"model": name, "ranks": size, "product": product, "outputs": N, "inputs": K, "rows": T,
               "tile": f"{plan.block_n}x{plan.block_k}", "parts": plan.split, "moved / least": moved / least, **found}  # fmt: skip


def attention_rows(name: str, size: int, T: int, bucket: int) -> Iterator[dict[str, Any]]:
    """What becomes of attention of T tokens over a text that fills the bucket."""
    import kernels

    check_divides(shape(name), size, "this model")
    c = local_config(shape(name), size)
    K, G, C = c.n_kv_heads, c.n_heads // c.n_kv_heads, c.head_dim
    plan = attention.plan_for(K, G * T, bucket, PROCESSORS)
    least, moved = attention.bytes_moved(T, K, G, C, bucket, plan)
    head = (bucket + Cache.SPARE) * C
    sizes = {"T": T, "k_head": head, "v_head": head, "share": plan.share(bucket)}
    found = compiled(kernels.few_queries, ATTENTION, sizes, attention.constants(G, C, plan), plan)
    yield {"model": name, "ranks": size, "key heads": K, "queries": G, "tokens": T, "bucket": bucket,
           "tile": f"{plan.block_r}x{plan.block_s}", "parts": plan.split, "moved / least": moved / least, **found}  # fmt: skip


def table(rows: Iterator[dict[str, Any]], out: Any) -> list[dict[str, Any]]:
    """Print rows as they come, and give them."""
    done = list[dict[str, Any]]()
    for row in rows:
        if not done:
            print(f"| {' | '.join(row)} |\n{'| --- ' * len(row)}|", file=out)
        print(f"| {' | '.join(f'{x:.2f}' if isinstance(x, float) else str(x) for x in row.values())} |", file=out, flush=True)
        done.append(row)
    return done


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--models", default="llama-3.1-8b,llama-3.1-70b,llama-3.1-405b", metavar="LIST", help="shapes")
    parser.add_argument("--nproc", default="1,2,8", metavar="LIST", help="ranks (default: 1,2,8)")
    parser.add_argument("--rows", default="1,2,26", metavar="LIST", help="tokens (default: 1,2,26)")
    parser.add_argument("--bucket", type=int, default=2048, metavar="N", help="positions of the cache (default: 2048)")
    parser.add_argument("--json", action="store_true", help="end stdout with one JSON object; the tables go to stderr")
    args = parser.parse_args()
    if importlib.util.find_spec("triton") is None:
        raise UserError("this needs Triton: pip install triton")
    unknown = [name for name in args.models.split(",") if name not in ROWS]
    if unknown:
        raise UserError(f"--models names {unknown[0]!r}; known shapes are {', '.join(ROWS)}")
    if args.bucket < 1:
        raise UserError(f"--bucket is {args.bucket}; it must be at least 1")
    out, said = sys.stderr if args.json else sys.stdout, {}
    kinds: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {"attention": attention_rows, "products": product_rows}
    for kind, rows_of in kinds.items():
        cases = itertools.product(args.models.split(","), map(int, args.nproc.split(",")), map(int, args.rows.split(",")))
        said[kind] = table((row for case in cases for row in rows_of(*case, args.bucket)), out)
        print(file=out)
    if args.json:
        print(json.dumps(said | {"spilled": sum(row["spilled"] for rows in said.values() for row in rows)}))


if __name__ == "__main__":
    run_cli(main)
