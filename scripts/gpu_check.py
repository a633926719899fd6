"""Everything about this project that needs a GPU, in one command: is it right there, how fast is it, and what follows for eight.

  right      the demo pair: texts on the GPU against the CPU's, and rounds as CUDA graphs against rounds as they are
  kernels    the int8 product against its reference, its time against the plain expression's, the bandwidth it reaches
  attention  the same of attention over the cache, beside PyTorch's
  8b-*       plain decoding of an 8B with random weights, in bfloat16 and int8
  shard-*    one rank's part of 8B/405B on 8 and of 8B/70B on 2 GPUs, judge decoding at the published acceptance
  forecast   those rounds with the collectives that one GPU leaves out, by the latencies that roofline.py takes for granted

Each part is a process of its own, so that one that fails leaves the others their turn; what is known so far is in the file after
each, and a file that is there already is added to. It needs torch 2.11 or newer, the other packages of requirements.txt, and
about 60 GB of GPU memory; it ends within eight minutes, whatever hangs.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

import torch
from kernel_report import products
from roofline import GPUS, model_of, pass_terms
from shapes import shape
from tasks import encode, read_problems

import attention
import checkpoint
from engine import Engine, Sampling
from files import check_writable, write_json
from llm import DEMO
from model import Cache, common_length
from tp import local_config

HERE = Path(__file__).resolve().parent
SHARDS = {  # target, draft, ranks, published m* (the 70B's follows from 141 tokens/s at three times plain; it is a guess)
    "shard-405b": ("llama-3.1-405b", "llama-3.1-8b", 8, 19.7),
    "shard-70b": ("llama-3.1-70b", "llama-3.1-8b", 2, 18.0),
}
DEADLINE_S = 460
CASES = [("plain", 0, 0.0), ("standard", 8, 0.0), ("judge", 25, 0.0), ("standard", 5, 0.8), ("judge", 25, 0.8), ("kl", 8, 0.0)]


def check_right(device: str, tokens: int = 200) -> dict[str, Any]:
    """Texts of the demo pair in fp32: on the CPU, on the device with rounds as they are, and with rounds as CUDA graphs.

    Draws differ between devices, so only greedy texts can be the CPU's; and two logits may tie within rounding, so most of one
    must be. Between graphs and rounds as they are every token must agree, compiled or not.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    pair = checkpoint.find_pair(str(DEMO / "target"), str(DEMO / "draft"), DEMO / "judge.pt")
    prompts = [encode(pair.tokenizer, problem, "demo") for problem in read_problems("demo", None, 3)]
    models = {name: pair.load(torch.float32, name) for name in ("cpu", device)}
    longest = max(map(len, prompts)) + tokens

    def texts(where: str, case: tuple[str, int, float], capture: bool, compile: bool = False) -> list[list[int]]:
        verify, M, temperature = case
        target, draft = models[where]
        engine = Engine(
            target, draft if M else None, draft_len=M, verify="standard" if verify == "plain" else verify,
            sampling=Sampling(temperature, seed=1), max_len=longest, capture=capture, compile=compile,
        )  # fmt: skip
        engine.warm_up(min(map(len, prompts)), longest)
        return [engine.complete(prompt, tokens) for prompt in prompts]

    rows: list[dict[str, Any]] = []
    for case in CASES:
        as_it_is = texts(device, case, False)
        same = None if case[2] else sum(map(common_length, as_it_is, texts("cpu", case, False))) / (tokens * len(prompts))
        rows.append({"rule": case[0], "M": case[1], "temperature": case[2], "as_cpu": same,
                     "graph_as_it_is": texts(device, case, True) == as_it_is})  # fmt: skip
    compiled = [texts(device, CASES[2], capture, compile=True) for capture in (False, True)]  # compiled blocks replace the others
    rows.append({"rule": "judge, compiled", "as_cpu": None, "graph_as_it_is": compiled[0] == compiled[1]})
    agree = all(row["graph_as_it_is"] for row in rows)
    return {"rows": rows, "right": agree and all(row["as_cpu"] is None or row["as_cpu"] > 0.5 for row in rows)}


def compare(
    label: str, plain: str, plans: Sequence[Any], by: Callable, args: tuple[Any, ...], exact: torch.Tensor,
    size_of_one: torch.Tensor, clock: Callable,
) -> dict[str, Any]:  # fmt: skip
    """``by(plan, *args)`` for each plan and for PyTorch's own way, None, which is called ``plain``: the largest errors in units of
    ``size_of_one``, and the times by ``clock``."""
    ways: dict[str, Any] = {plain: None} | {str(tuple(p)): p for p in plans}
    errors, times = {}, {}
    for way, plan in ways.items():
        print(f"{label}, {way}", file=sys.stderr, flush=True)
        run = functools.partial(by, plan, *args)
        errors[way], times[way] = float(((run() - exact).abs() / size_of_one).max()), clock(run)
    best = min(times, key=lambda way: times[way])
    return {
        "best": best, "us": 1e6 * times[best], f"{plain}_us": 1e6 * times[plain], f"{plain}_error": errors[plain],
        "largest_error": max(error for way, error in errors.items() if way != plain),
    }  # fmt: skip


def check_kernels(
    device: str, cases: list[tuple[str, int]], rows: tuple[int, ...], seconds: Callable | None = None
) -> dict[str, Any]:
    """The int8 product of every kind of layer: its error in units of the last place of 16 bits, and its time."""
    import kernels

    clock, found, seen = seconds or kernels.seconds, list[dict[str, Any]](), set[tuple[int, int]]()
    dtype = torch.bfloat16 if device == "cuda" else torch.float16  # what Triton's interpreter can multiply
    processors = kernels.processors_of(torch.device(device)) if device == "cuda" else 4
    for name, size in cases:
        for product, (N, K) in products(shape(name), size).items():
            if (N, K) in seen:
                continue
            seen.add((N, K))
            weight = torch.randint(-127, 128, (N, K), dtype=torch.int8, device=device)
            scale = torch.rand(N, device=device) / 127
            for T in rows:
                x = torch.randn(T, K, device=device).to(dtype)
                exact = x.float() @ (weight.float() * scale[:, None]).t()
                size_of_one = exact.abs() * torch.finfo(dtype).eps + 1e-3 * exact.std()
                plans, args = kernels.plans_for(N, K, processors), (x, weight, scale, None)
                row = compare(f"{product} {N} x {K}, {T} rows", "plain", plans, kernels.by, args, exact, size_of_one, clock)
                found.append({"model": name, "ranks": size, "product": product, "N": N, "K": K, "rows": T, **row,
                              "gb_s": N * K / row["us"] / 1e3})  # fmt: skip
    return {"products": found, "right": all(row["largest_error"] < 2 for row in found)}


def check_attention(
    device: str, cases: list[tuple[str, int]], tokens: tuple[int, ...], bucket: int = 2048, seconds: Callable | None = None
) -> dict[str, Any]:
    """Attention of a few tokens behind a text that fills the bucket: its error as above, its time, and PyTorch's of both."""
    import kernels

    clock, found = seconds or kernels.seconds, list[dict[str, Any]]()
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    processors = kernels.processors_of(torch.device(device)) if device == "cuda" else 4
    for name, size in cases:
        c = local_config(shape(name), size)
        K, G, C = c.n_kv_heads, c.n_heads // c.n_kv_heads, c.head_dim
        k, v = torch.randn(2, K, bucket + Cache.SPARE, C, device=device).to(dtype)[:, :, :bucket].unbind()
        for T in tokens:
            q, positions = torch.randn(T, K * G, C, device=device).to(dtype), torch.arange(bucket - T, bucket, device=device)
            hidden = torch.arange(bucket, device=device) > positions[:, None]
            mask = torch.zeros((), dtype=dtype, device=device).masked_fill(hidden, float("-inf")).repeat(G, 1)
            exact = attention.masked(q.double(), k.double(), v.double(), mask.double())
            size_of_one = torch.finfo(dtype).eps * (exact.abs() + exact.std())
            plans, args = attention.plans_for(K, G * T, bucket, processors), (q, k, v, mask, positions)
            row = compare(f"attention {K} x {G}, {T} tokens", "sdpa", plans, attention.by, args, exact, size_of_one, clock)
            found.append({"model": name, "ranks": size, "key_heads": K, "groups": G, "tokens": T, "bucket": bucket, **row})
    return {"attention": found, "right": all(row["largest_error"] < 2 for row in found)}


def bench_command(*options: str) -> list[str]:
    # texts that stay within one bucket of the cache, so that no time goes into compiling for others
    small = ["--json", "--limit", "2", "--repeat", "4", "--prompt-tokens", "16", "--new-tokens", "60"]
    return [sys.executable, str(HERE / "benchmark.py"), *small, *options]


def parts() -> dict[str, tuple[list[str], int]]:
    """Every part's command, and the seconds it may take at most."""
    own = [sys.executable, str(HERE / "gpu_check.py"), "--part"]
    found = {"right": ([*own, "right"], 140)}
    for name, (target, draft, ranks, accepted) in SHARDS.items():
        options = ["--random-weights", target, draft, "--rank-of", str(ranks), "--quantize", "int8", "--acceptance", str(accepted)]
        found[name] = (bench_command(*options), 130)
    for kept in ("none", "int8"):
        found[f"8b-{kept}"] = (bench_command("--random-weights", "llama-3.1-8b", "--quantize", kept), 90)
    found["attention"] = ([*own, "attention"], 60)
    found["kernels"] = ([*own, "kernels"], 150)
    return found


def forecast(report: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second of the whole, from one rank's measured round and the collectives it left out."""
    found = {}
    for name, (target, draft, ranks, accepted) in SHARDS.items():
        if "settings" not in report.get(name, {}):
            continue
        row = report[name]["settings"]["judge"]
        M = int(row["draft_len"])
        step, verify = (pass_terms(model_of(shape(model), ranks, "int8"), GPUS["h100"], T, 128)["collectives"]
                        for model, T in ((draft, 1), (target, M + 1)))  # fmt: skip
        round_ms = row["round_ms"][0] + M * step + verify
        found[name] = {
            "measured_round_ms": row["round_ms"][0], "collectives_ms": M * step + verify, "round_ms": round_ms,
            "tokens_per_round": 1 + row["mean_accepted"], "tokens_per_s": 1e3 * (1 + row["mean_accepted"]) / round_ms,
            "m_star": accepted, "draft_step_ms": row["draft_step_ms"][0], "verify_ms": row["verify_ms"][0],
        }  # fmt: skip
    return found


def run_part(name: str, command: list[str], limit: float) -> dict[str, Any]:
    """What a part's last line says, or how it failed."""
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as error:
        said = error.stderr.decode() if isinstance(error.stderr, bytes) else error.stderr or ""
        return {"failed": f"took more than {limit:.1f} s; last said: {said[-500:]}"}
    seconds = time.perf_counter() - start
    if done.returncode:
        return {"failed": done.stderr[-2000:], "seconds": seconds}
    print(done.stderr[-3000:], file=sys.stderr)
    return json.loads(done.stdout.splitlines()[-1]) | {"seconds": seconds}


def main() -> None:
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=Path("gpu_check.json"), metavar="FILE", help="default: gpu_check.json")
    p.add_argument("--only", nargs="+", choices=list(parts()), help="these parts alone")
    p.add_argument("--part", choices=["right", "attention", "kernels"], help=argparse.SUPPRESS)
    args = p.parse_args()
    if not torch.cuda.is_available():
        raise UserError("there is no CUDA device here, and this checks one")
    if args.part is not None:
        with torch.inference_mode():
            cases = [("llama-3.1-8b", 1), ("llama-3.1-405b", 8), ("llama-3.1-70b", 2)]
            if args.part == "attention":
                said = check_attention("cuda", [*cases, ("llama-3.1-8b", 8)], (1, 26))
            else:
                said = check_right("cuda") if args.part == "right" else check_kernels("cuda", cases, (1, 2, 26))
        return print(json.dumps(said))
    check_writable("--out", args.out)
    report: dict[str, Any] = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    report |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    start = time.perf_counter()
    for name, (command, limit) in parts().items():
        if args.only is None or name in args.only:
            left = DEADLINE_S - (time.perf_counter() - start)
            print(f"--- {name}", file=sys.stderr, flush=True)
            report[name] = run_part(name, command, min(limit, left)) if left > 5 else {"failed": "there was no time left for it"}
            report["forecast"] = forecast(report)
            write_json(args.out, report)
    failed = [name for name, found in report.items() if isinstance(found, dict) and "failed" in found]
    wrong = [name for name in ("right", "attention", "kernels") if report.get(name, {}).get("right") is False]
    print(json.dumps({"failed": failed, "wrong": wrong, "forecast": report.get("forecast")}))
    if failed or wrong:
        sys.exit(1)


if __name__ == "__main__":
    run_cli(main)
