"""Train a judge head for a target from (question, correct, wrong, mistake) tuples, a JSON line each."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tqdm import tqdm

import checkpoint
from errors import Parser, UserError, run_cli
from judge import KINDS, LABEL_RULES, WRONG, Head, features, read_tuples, to_examples, train_head
from tokenizer import load_tokenizer


def main() -> None:
    p = Parser(description=__doc__)
    p.add_argument("tuples", type=Path, help="JSON lines of question, correct, wrong, mistake: [start, end) in characters of wrong")
    p.add_argument("--target", required=True, metavar="NAME", help="checkpoint the head is for")
    p.add_argument("--out", required=True, type=Path, metavar="FILE", help="where to")
    p.add_argument("--kind", choices=KINDS, default="post_norm", help="state the head reads (default: post_norm)")
    p.add_argument("--labels", choices=LABEL_RULES, default="span", help="what follows a mistake: left out or wrong (span)")
    p.add_argument("--raw", action="store_true", help="the questions are whole prompts: no chat template")
    p.add_argument("--dtype", choices=list(checkpoint.DTYPES), default="bfloat16", help="the target's (default: bfloat16)")
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    tuples = read_tuples(args.tuples)
    folder = checkpoint.find_checkpoint(args.target)
    if not args.out.parent.is_dir():
        raise UserError(f"--out {args.out}: there is no folder {args.out.parent}")
    examples = to_examples(tuples, load_tokenizer(folder), args.labels, args.raw)
    context = checkpoint.load_config(folder).max_seq_len
    longest = max(len(e.prompt) + len(e.answer) for e in examples)
    if longest > context:
        raise UserError(f"the longest question and answer have {longest} tokens; the target's context is {context}")
    model = checkpoint.load_model(folder, checkpoint.DTYPES[args.dtype], args.device)
    states, labels, questions = features(model, examples, args.kind, lambda rows: tqdm(rows, desc="states", unit="answer"))
    result = train_head(states, labels, questions, seed=args.seed)
    Head(result.weight, result.bias, args.kind, folder.name, checkpoint.fingerprint(folder), label_rule=args.labels).save(args.out)
    print(
        f"{len(labels)} tokens, {int((labels == WRONG).sum())} of them wrong; {result.epochs} epochs. On held-out questions: "
        f"AUC {result.auc:.3f}, {result.recall:.1%} of wrong tokens stopped, {result.kept:.1%} of right ones kept at δ = 0.5"
    )


if __name__ == "__main__":
    run_cli(main)
