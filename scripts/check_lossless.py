"""Check that plain, standard speculative and judge decoding at δ = 1 give one text, token for token, greedily.

The judge at δ = 1 runs with a head (a random one if none is given), which must then accept nothing. In fp32 every text must be
equal; in 16 bits two logits may tie within rounding, so where texts part the place and the gap between the two likeliest logits
are printed. Then the target drafts for itself, and every drafted token must be accepted. Exit status 1 if anything differed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

import torch
from tasks import TASKS, encode, read_problems
from tqdm import tqdm

import checkpoint
from engine import Engine
from llm import DEMO
from model import Reader, Transformer


@torch.inference_mode()
def logit_gap(model: Transformer, text: list[int]) -> float:
    """How far the likeliest next token's logit lies above the second's after ``text``."""
    first, second = model.logits(Reader(model, len(text)).read(text)[-1:])[0][0].topk(2).values
    return float(first - second)


def self_drafted(target: Transformer, prompt: list[int], n: int) -> tuple[int, int]:
    """(accepted, drafted) tokens over n new ones when the target drafts for itself, 8 at a time."""
    prompt = prompt[: max(2, target.config.max_seq_len - n - 9)]  # so that the text fits into a short context
    engine = Engine(target, target, draft_len=8, max_len=len(prompt) + n + 9)
    engine.prefill(prompt)
    accepted = drafted = new = 0
    for now in engine.rounds(len(prompt)):
        accepted, drafted, new = accepted + len(now.tokens) - 1, drafted + 8, new + len(now.tokens)
        if new >= n:
            break
    return accepted, drafted


def lengths(text: str) -> list[int]:
    """``1-4,25`` as [1, 2, 3, 4, 25]. Raises UserError."""
    try:
        ends = [[int(x) for x in part.split("-")] for part in text.split(",")]
        found = [m for e in ends for m in range(e[0], e[-1] + 1)]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UserError(f"--draft-lens is {text!r}; give lengths of at least 1 as 1-32 or 1,4,16")
    return found


def main() -> None:
    p = Parser(description=__doc__)
    p.add_argument("--target", default=str(DEMO / "target"), metavar="NAME", help="default: the demo's")
    p.add_argument("--draft", default=str(DEMO / "draft"), metavar="NAME", help="default: the demo's")
    p.add_argument("--judge", type=Path, metavar="FILE", help="a head for the target (default: a random one)")
    p.add_argument("--task", choices=TASKS, default="demo", help="where the prompts come from (default: demo)")
    p.add_argument("--data", type=Path, metavar="FILE", help="the task's data")
    p.add_argument("--prompts", type=int, default=20, metavar="N", help="how many (default: 20)")
    p.add_argument("--draft-lens", default="1-32", metavar="LIST", help="tokens drafted a round, as 1-32 or 1,4,16 (default: 1-32)")
    p.add_argument("--new-tokens", type=int, default=80, metavar="N", help="tokens compared (default: 80)")
    p.add_argument("--self-tokens", type=int, default=500, metavar="N", help="tokens the target drafts for itself (default: 500)")
    p.add_argument("--dtype", choices=list(checkpoint.DTYPES), default="float32", help="default: float32")
    args = p.parse_args()
    Ms = lengths(args.draft_lens)
    if args.new_tokens < 1 or args.self_tokens < 1:
        raise UserError(f"--new-tokens is {args.new_tokens} and --self-tokens {args.self_tokens}; both must be at least 1")
    pair = checkpoint.find_pair(args.target, args.draft, args.judge)
    prompts = [encode(pair.tokenizer, problem, args.task) for problem in read_problems(args.task, args.data, args.prompts)]
    target, draft = pair.load(checkpoint.DTYPES[args.dtype])
    if pair.head is None:
        target.fuse_judge(torch.randn(target.config.dim, generator=torch.Generator().manual_seed(0)), 0.0, "post_norm")
    room = max(map(len, prompts)) + args.new_tokens
    plain = Engine(target, max_len=room)
    texts = [plain.complete(prompt, args.new_tokens) for prompt in tqdm(prompts, desc="plain", unit="text", disable=None)]
    compared = differing = 0
    for M in tqdm(Ms, desc="draft lengths", disable=None):
        for verify in ("standard", "judge"):
            engine = Engine(target, draft, draft_len=M, verify=verify, threshold=1.0, max_len=room)
            for prompt, expected in zip(prompts, texts, strict=True):
                got = engine.complete(prompt, args.new_tokens)
                compared += 1
                if got != expected:
                    differing += 1
                    at = next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
                    gap = logit_gap(target, prompt + expected[:at])
                    print(f"M = {M}, {verify}: token {at} is {got[at]}, plainly {expected[at]}; logit gap {gap:.2g}")
    print(f"{compared} texts of {args.new_tokens} tokens compared with plain decoding, {differing} differ")
    accepted, drafted = self_drafted(target, prompts[0], args.self_tokens)
    print(f"the target drafting for itself: {accepted} of {drafted} tokens accepted")
    if differing or accepted < drafted:
        sys.exit(1)


if __name__ == "__main__":
    run_cli(main)
