"""Train a judge head for a target from labelled answers, and say what it is worth on questions it has not seen.

Labels are JSON lines: what scripts/label.py writes, or tuples of question, correct, wrong, mistake ([start, end) in characters
of wrong). The target's states are read once and kept beside the labels, so another kind of head or another seed starts at once.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

import checkpoint
from files import check_writable, remove, replacing
from judge import KINDS, LABEL_RULES, WRONG, Head, read_labels
from llm import DEMO, default_dtype, is_demo
from tp import Ranks, default_device, ranks_of, same, together, told
from training import Seen, TrainResult, as_features, labels_of, read_states, train_head

THRESHOLDS = (0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99)


def cached_states(path: Path, key: str) -> Seen | None:
    """What an earlier run wrote for the same ``key``, undamaged."""
    remove(path.with_name(path.name + ".partial"))  # of one that was killed
    try:
        with safe_open(path, framework="pt") as file:
            metadata, seen = file.metadata() or {}, Seen(*map(file.get_tensor, Seen._fields))
    except (FileNotFoundError, SafetensorError):
        return None
    return seen if metadata == {"key": key, "crc32": checksums(seen)} else None


def checksums(seen: Seen) -> str:
    """One for each tensor, as text."""
    return " ".join(str(checkpoint.checksum(tensor)) for tensor in seen)


def keep_states(path: Path, key: str, seen: Seen) -> None:
    """Write what the target saw for ``cached_states`` to find."""
    with replacing(path) as partial:
        save_file(seen._asdict(), partial, {"key": key, "crc32": checksums(seen)})


def report(result: TrainResult, recall: float, threshold: float) -> str:
    """What the head does on the held-out questions, as text."""
    lines = [
        f"questions a head hasn't seen: {len(result.right)} right and {len(result.wrong)} wrong tokens, AUC {result.auc:.3f}",
        "",
    ]
    lines += ["| δ | mistakes stopped | stopped that are mistakes | right tokens kept |", "| --- | --- | --- | --- |"]
    for row in sorted(result.at(x) for x in {*THRESHOLDS, threshold}):
        chosen = f" (chosen: stops {recall:.0%} of the mistakes)" if row.threshold == threshold else ""
        lines.append(f"| {row.threshold:.3g}{chosen} | {row.recall:.1%} | {row.precision:.1%} | {row.kept:.1%} |")
    bins = result.calibration()
    error = sum(abs(mean - share) * weight for mean, share, weight in bins)
    lines += ["", f"calibration, right and wrong tokens weighing the same: off by {error:.3f} on average"]
    lines += [f"  says {mean:.2f}, is {share:.2f} ({weight:.0%} of the weight)" for mean, share, weight in bins if weight >= 0.005]
    return "\n".join(lines)


def parse_args():
    p = Parser(description=__doc__)
    p.add_argument("labels", type=Path, help="JSON lines of labelled answers or of tuples")
    p.add_argument("--target", default=str(DEMO / "target"), metavar="NAME", help="the head is for it (default: the demo's)")
    p.add_argument("--out", required=True, type=Path, metavar="FILE", help="where to write the head")
    p.add_argument("--kind", choices=KINDS, default="post_norm", help="state the head reads (default: post_norm)")
    p.add_argument("--labels-after", choices=LABEL_RULES, default="span", dest="label_rule",
                   help="tuples: what follows a mistake is left out (span) or wrong too (rest); default: span")  # fmt: skip
    p.add_argument("--raw", action="store_true", help="tuples: the questions are whole prompts, no chat template")
    p.add_argument("--recall", type=float, default=0.9, metavar="R", help="share of mistakes that δ has to stop (default: 0.9)")
    p.add_argument("--floor", type=float, default=1e-4, metavar="P",
                   help="the judge takes no token that the target gives less probability (default: 1e-4)")  # fmt: skip
    p.add_argument("--lr", type=float, help="AdamW's learning rate (default: 1e-4; 1e-3 for the demo's target, which is narrow)")
    p.add_argument("--states", type=Path, metavar="FILE", help="where the target's states are kept (default: beside the labels)")
    p.add_argument("--dtype", choices=list(checkpoint.DTYPES), help="the target's (default: bfloat16; float32 for the demo's)")
    p.add_argument("--device", choices=["cuda", "cpu"], default=default_device(), help="default: cuda where there is one")
    p.add_argument("--seed", type=int, default=0, help="of the split and the order (default: 0)")
    p.add_argument("--json", action="store_true", help="end stdout with one JSON object; the report goes to stderr")
    args = p.parse_args()
    args.dtype = args.dtype or default_dtype(args.target)
    args.lr = args.lr if args.lr is not None else 1e-3 if is_demo(args.target) else 1e-4
    for name, value in (("recall", args.recall), ("floor", args.floor)):
        if not 0 <= value <= 1:
            raise UserError(f"--{name} is {value:g}; it must lie in [0, 1]")
    if not 0 < args.lr < math.inf:
        raise UserError(f"--lr is {args.lr:g}; it must be a number above 0")
    check_writable("--out", args.out)
    check_writable("--states", args.states)
    return args


def main() -> None:
    args = parse_args()
    with ranks_of(args.device) as ranks:
        run(args, ranks)


def run(args, ranks: Ranks) -> None:
    """Read the states, as one of the ranks; rank 0 trains and writes."""
    pair = checkpoint.find_pair(args.target)
    with together():
        examples = read_labels(args.labels, pair.tokenizer, args.label_rule, args.raw)
    longest = max(len(e.prompt) + len(e.answer) for e in examples)
    if longest > pair.context:
        raise UserError(f"the longest question and answer have {longest} tokens; the target's context is {pair.context}")
    mark = checkpoint.fingerprint(pair.target)
    key = hashlib.sha256(json.dumps([mark, args.dtype, examples]).encode()).hexdigest()
    path = args.states or args.labels.with_name(f"{args.labels.name}.{pair.target.name}.{args.dtype}.{args.label_rule}.states")
    model, _ = pair.load(checkpoint.DTYPES[args.dtype], args.device)
    same("set of labels", key)
    seen = cached_states(path, key) if ranks.rank == 0 else None
    if not told(lambda: seen is not None):
        seen = read_states(model, examples, lambda rows: tqdm(rows, desc="states", unit="answer", disable=None))
        if ranks.rank == 0:
            keep_states(path, key, seen)
            print(f"the target's states are kept in {path}", file=sys.stderr)
    if ranks.rank:
        return
    assert seen is not None
    labels, questions = labels_of(examples)
    features = as_features(model, seen.states, args.kind)
    result = train_head(features, labels, questions, seen.log_p, seen.own, seed=args.seed, lr=args.lr)
    threshold = result.threshold_for(args.recall)
    made_for = args.kind, pair.target.name, mark, threshold, args.label_rule, args.floor
    Head(result.weight, result.bias, *made_for, result.log_p).save(args.out)
    counts = f"; a log-probability counts {result.log_p:.2f} (without it AUC {result.auc_without:.3f})" if result.log_p else ""
    print(f"{len(labels)} tokens, {int((labels == WRONG).sum())} of them wrong; {result.epochs} epochs{counts}\n"
          + report(result, args.recall, threshold), file=sys.stderr if args.json else sys.stdout)  # fmt: skip
    if args.json:
        print(json.dumps({
            "tokens": len(labels), "wrong": int((labels == WRONG).sum()), "epochs": result.epochs, "auc": result.auc,
            "log_p": result.log_p, "auc_without_log_p": result.auc_without, "threshold": threshold,
            "at_0.5": result.at(0.5)._asdict(),
            "at_threshold": result.at(threshold)._asdict(),
            "calibration": result.calibration(),
        }))  # fmt: skip


if __name__ == "__main__":
    run_cli(main)
