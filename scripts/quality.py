"""What do fewer bits cost? Reads given answers with a target in every form, and compares.

For each form: the weights' rounding error, the perplexity of the answers, how many of the target's likeliest tokens stay the
same as in fp32, and with a head how many of the judge's verdicts differ from those in bfloat16.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

import torch
from accept import Text, read_texts
from tasks import TASKS
from torch import Tensor
from tqdm import tqdm

import checkpoint
from judge import judge_logits, log_probabilities
from linear import JUDGE_ROWS, MODES, Int4Linear, Int8Linear, quantized
from model import Reader, Transformer

FORMS = {"fp32": ("float32", "none"), "bf16": ("bfloat16", "none"), **{mode: ("bfloat16", mode) for mode in MODES}}


def weight_error(folder: Path, mode: str) -> float:
    """Root mean square of the rounding of all quantized weights over that of the weights; the output projection is in int8."""
    config = checkpoint.load_config(folder)
    source = checkpoint.open_source(folder, config)
    wrong = all_of_them = 0.0
    for name in source.files:
        if not checkpoint.is_quantized(name):
            continue
        weight = checkpoint.read_part(source, name, config).float()
        kept = "int8" if name == "output.weight" else mode
        parts = quantized(weight, kept)
        back = Int8Linear.dequantize(parts) if kept == "int8" else Int4Linear.dequantize(parts)[:, : weight.shape[1]]
        wrong, all_of_them = wrong + float((back - weight).square().sum()), all_of_them + float(weight.square().sum())
    return math.sqrt(wrong / all_of_them)


@torch.inference_mode()
def read(model: Transformer, texts: list[Text], name: str) -> dict[str, Tensor]:
    """Of every token of the answers: its log-probability, the likeliest token in its place, and the judge's logit."""
    reader = Reader(model, max(len(t.prompt) + len(t.answer) for t in texts))
    found: dict[str, list[Tensor]] = {"log_p": [], "best": [], "judge": []}
    for text in tqdm(texts, desc=name, unit="answer", disable=None):
        logits, judge = model.logits(reader.read(text.prompt + text.answer)[len(text.prompt) - 1 :])
        log_p = log_probabilities(logits[:-1], torch.tensor(text.answer))
        found["log_p"].append(log_p)
        found["best"].append(logits[:-1].argmax(-1))
        if judge is not None:
            found["judge"].append(judge_logits(model, judge[1:], log_p))
    return {key: torch.cat(parts) for key, parts in found.items() if parts}


def with_a_plain_row(model: Transformer, head) -> Transformer:
    """The int8 model with the judge's row rounded like any other, for comparison with what ``with_judge`` makes of it."""
    twin = head.on(model)
    output = twin.output
    assert isinstance(output, Int8Linear)
    output.scale.data[-JUDGE_ROWS + 1 :] = 0  # the rows that hold what rounding took
    return twin


def compare(found: dict[str, dict[str, Tensor]], threshold: float) -> dict[str, dict[str, Any]]:
    """The table's rows."""
    rows: dict[str, dict[str, Any]] = {}
    for name, now in found.items():
        rows[name] = {
            "perplexity": math.exp(-float(now["log_p"].mean())),
            "same_best": float((now["best"] == found["fp32"]["best"]).float().mean()),
        }
        if "judge" in now:
            right, wanted = (x["judge"].sigmoid() > threshold for x in (now, found["bf16"]))
            rows[name]["verdicts_changed"] = float((right != wanted).float().mean())
    return rows


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = ["| form | weights' rounding | perplexity | same likeliest token as fp32 | verdicts unlike bf16's |",
             "| --- | --- | --- | --- | --- |"]  # fmt: skip
    for name, r in rows.items():
        error = f"{100 * r['weight_error']:.2f} %" if "weight_error" in r else "–"
        changed = f"{100 * r['verdicts_changed']:.2f} %" if "verdicts_changed" in r else "–"
        lines.append(f"| {name} | {error} | {r['perplexity']:.4f} | {100 * r['same_best']:.2f} % | {changed} |")
    return "\n".join(lines)


def parse_args():
    p = Parser(description=__doc__)
    p.add_argument("data", type=Path, nargs="?", help="JSON lines of question and answer, or with --task that task's data")
    p.add_argument("--task", choices=TASKS, help="take the task's prompts and given answers")
    p.add_argument("--target", required=True, metavar="NAME", help="checkpoint, not quantized")
    p.add_argument("--judge", type=Path, metavar="FILE", help="judge head")
    p.add_argument("--limit", type=int, default=50, metavar="N", help="answers (default: 50)")
    p.add_argument("--json", action="store_true", help="end stdout with one JSON object; the table goes to stderr")
    args = p.parse_args()
    if args.limit < 1:
        raise UserError(f"--limit is {args.limit}; it must be at least 1")
    return args


def main() -> None:
    args = parse_args()
    pair = checkpoint.find_pair(args.target, None, args.judge)
    if checkpoint.open_source(pair.target, checkpoint.load_config(pair.target)).quantization != "none":
        raise UserError(f"{pair.target} is quantized already; compare with the checkpoint it was made from")
    texts = read_texts(args.data, args.task, args.limit, False, pair)
    found: dict[str, dict[str, Tensor]] = {}
    for name, (dtype, mode) in FORMS.items():
        model, _ = pair.load(checkpoint.DTYPES[dtype], quantization=mode)
        found[name] = read(model, texts, name)
        if name == "int8" and pair.head is not None:
            found["int8, judge's row like any other"] = read(with_a_plain_row(model, pair.head), texts, "int8, one row")
    rows = compare(found, pair.head.threshold if pair.head is not None else 0.5)
    for mode in MODES:
        rows[mode]["weight_error"] = weight_error(pair.target, mode)
    print(table(rows), file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps({"answers": len(texts), "tokens": sum(len(t.answer) for t in texts), "forms": rows}))


if __name__ == "__main__":
    run_cli(main)
