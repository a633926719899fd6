"""How far would the target accept given answers: a person's, another model's, any text?

Each answer is read in one pass. A rule's flags on all of its tokens then give the share accepted, by place, and the mean
accepted run a round for every draft length, as if some draft had proposed exactly this text: at m tokens a round the standard
test soon stops growing with the draft length, a judge doesn't.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

import torch
from evaluate import Contender, parse_rules
from plots import check_plot, curves_figure
from tasks import TASKS, encode, question_and_answer, read_problems
from torch import Tensor
from tqdm import tqdm

import checkpoint
from engine import Note, match_vocabulary
from files import check_writable, read_jsonl, write_text
from judge import RULES, Block, judge_logits, known, log_probabilities, rules_with_knobs, verdict
from llm import DEMO, default_dtype, is_demo
from model import Reader, Transformer
from page import Passage, Span, describe, page, token_texts
from tokenizer import Tokenizer
from tp import Ranks, default_device, ranks_of

LONGEST_BLOCK = 40
PLACES = 8  # parts of an answer whose acceptance is shown apart


class Text(NamedTuple):
    question: str  # as it is shown
    prompt: list[int]
    answer: list[int]


def read_texts(path: Path | None, task: str | None, limit: int, raw: bool, pair: checkpoint.Pair) -> list[Text]:
    """The answers to look at: a task's given ones, or rows of question and answer. Raises UserError."""
    tokenizer = pair.tokenizer
    if path is None and (task is None or TASKS[task].needs_data):
        raise UserError("give a JSON-lines file of questions and answers, or --task demo, which needs none")
    if task is None:
        assert path is not None
        rows = read_jsonl(path, question_and_answer)[:limit]
        found = [Text(r["question"], tokenizer.encode_question(r["question"], raw), tokenizer.encode(r["answer"])) for r in rows]
    else:
        problems = [p for p in read_problems(task, path, limit) if p.given]
        found = [Text(p.turns[0], encode(tokenizer, p, task), tokenizer.encode(p.given or "")) for p in problems]
    found = [text for text in found if text.answer and text.prompt]
    if not found:
        raise UserError(f"{path or task} holds no given answers")
    longest = max(len(t.prompt) + len(t.answer) for t in found)
    if longest > pair.context:
        raise UserError(f"the longest question and answer have {longest} tokens; the context is {pair.context}")
    return found


def read_block(target: Reader, draft: Reader | None, text: Text) -> Block:
    """A whole answer as one block, as if it had been drafted."""
    ids = torch.tensor(text.answer)
    with torch.inference_mode():
        logits, judge = target.model.logits(target.read(text.prompt + text.answer)[len(text.prompt) - 1 :])
        own = None
        if draft is not None:
            own = draft.model.logits(draft.read(text.prompt + text.answer[:-1])[len(text.prompt) - 1 :])[0]
            own = match_vocabulary(own, logits.shape[-1]).cpu()
    logits = logits[:-1].cpu()
    log_p = log_probabilities(logits, ids)
    z = None if judge is None else judge_logits(target.model, judge[1:].cpu(), log_p)
    return Block(ids, logits.argmax(-1), logits, own, z, log_p, target.model.judge_floor)


def mean_accepted(flags: Sequence[Sequence[bool]], M: int) -> float:
    """Accepted tokens a round, when each text is drafted M tokens at a time; a rejected token is the target's in its place."""
    rounds = accepted = 0
    for text in flags:
        at = 0
        while at < len(text):
            block = text[at : at + M]
            n = next((i for i, ok in enumerate(block) if not ok), len(block))
            rounds, accepted, at = rounds + 1, accepted + n, at + n + 1
    return accepted / rounds


def by_place(flags: Sequence[Sequence[bool]]) -> list[float]:
    """Share accepted in each of PLACES equal parts of the answers."""
    hits, counts = [0] * PLACES, [0] * PLACES
    for text in flags:
        for i, ok in enumerate(text):
            part = i * PLACES // len(text)
            hits[part], counts[part] = hits[part] + ok, counts[part] + 1
    return [hit / count if count else 0.0 for hit, count in zip(hits, counts)]


def spans(text: Text, block: Block, standard: Tensor, rule: Tensor, tokenizer: Tokenizer) -> list[Span]:
    """The answer for the page."""
    logits = known(block.logits)
    p, best = logits.softmax(-1), logits.argmax(-1)
    q = None if block.draft_logits is None else block.draft_logits.softmax(-1)
    found = []
    for i, (token, said) in enumerate(zip(text.answer, token_texts(tokenizer, text.answer))):
        kind = "standard" if standard[i] else "rule" if rule[i] else "rejected"
        note = Note(
            int(best[i]), float(p[i, best[i]]), token, float(p[i, token]), math.nan if q is None else float(q[i, token]),
            math.nan if block.judge is None else float(block.judge[i].sigmoid()),
        )  # fmt: skip
        found.append(Span(said, kind, describe(tokenizer, note)))
    return found


def parse_args():
    p = Parser(description=__doc__)
    p.add_argument("data", type=Path, nargs="?", help="JSON lines of question and answer, or with --task that task's data")
    p.add_argument("--task", choices=TASKS, help="take the task's prompts and given answers")
    p.add_argument("--target", default=str(DEMO / "target"), metavar="NAME", help="checkpoint that judges (default: the demo's)")
    p.add_argument("--draft", metavar="NAME", help="a draft, for the rule kl and for its probabilities on the page")
    p.add_argument("--judge", type=Path, metavar="FILE", help="judge head (default: the demo's on the demo's target)")
    p.add_argument("--rules", metavar="LIST",
                   help=f"of standard, {rules_with_knobs()} (default: standard; judge with a head)")  # fmt: skip
    p.add_argument("--limit", type=int, default=100, metavar="N", help="answers (default: 100)")
    p.add_argument("--raw", action="store_true", help="the questions are whole prompts: no chat template")
    p.add_argument("--dtype", choices=list(checkpoint.DTYPES), help="default: bfloat16; float32 for the demo's target")
    p.add_argument("--device", choices=["cuda", "cpu"], default=default_device(), help="default: cuda where there is one")
    p.add_argument("--html", type=Path, metavar="FILE", help="write the answers as a page, judged by the last rule of the list")
    p.add_argument("--plot", type=Path, metavar="FILE", help="write the curve of m* against M (needs matplotlib)")
    p.add_argument("--json", action="store_true", help="end stdout with one JSON object; the tables go to stderr")
    args = p.parse_args()
    if args.limit < 1:
        raise UserError(f"--limit is {args.limit}; it must be at least 1")
    args.dtype = args.dtype or default_dtype(args.target)
    if is_demo(args.target):
        args.judge = args.judge or DEMO / "judge.pt"
    args.rules = args.rules or ("standard" if args.judge is None else "standard,judge")
    if args.raw and args.task:
        raise UserError(f"--raw has no meaning with --task {args.task}, which knows whether its prompts are raw")
    check_writable("--html", args.html)
    check_plot(args.plot)
    return args


def choose(args, pair: checkpoint.Pair) -> list[Contender]:
    """The rules asked for. Raises UserError for one that can't be had."""
    chosen = parse_rules(args.rules, {"judge": pair.head} if pair.head is not None else {})
    for rule in chosen:
        if rule.name in ("plain", "draft"):
            raise UserError(f"--rules names {rule.name}, which accepts nothing; there are standard, {', '.join(RULES)}")
        if "@" in rule.name:
            raise UserError(f"--rules names {rule.name!r}; every M from 1 to {LONGEST_BLOCK} is shown, and none is chosen")
        if rule.verify == "kl" and pair.draft is None:
            raise UserError("--rules names kl, which needs a --draft")
    return chosen


def tables(rules: dict[str, dict[str, Any]]) -> str:
    """Both tables as Markdown."""
    Ms = (1, 4, 8, 16, 25, LONGEST_BLOCK)
    lines = ["| rule | accepted | " + " | ".join(f"m* at {M}" for M in Ms) + " |", "| --- " * (len(Ms) + 2) + "|"]
    for name, r in rules.items():
        runs = " | ".join(f"{r['mean_accepted'][M - 1]:.2f}" for M in Ms)
        lines.append(f"| {name} | {r['acceptance_rate']:.1%} | {runs} |")
    lines += ["", f"| accepted in each {PLACES}th of an answer | " + " | ".join(str(i + 1) for i in range(PLACES)) + " |"]
    lines += ["| --- " * (PLACES + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(f"{x:.0%}" for x in r["by_place"]) + " |" for name, r in rules.items()]
    return "\n".join(lines)


def main() -> None:
    args = parse_args()
    with ranks_of(args.device) as ranks:
        run(args, ranks)


def run(args, ranks: Ranks) -> None:
    """Read the answers, as one of the ranks; rank 0 writes the files."""
    pair = checkpoint.find_pair(args.target, args.draft, args.judge)
    chosen = choose(args, pair)
    texts = read_texts(args.data, args.task, args.limit, args.raw, pair)
    longest = max(len(t.prompt) + len(t.answer) for t in texts)
    models: list[Transformer | None] = list(pair.load(checkpoint.DTYPES[args.dtype], args.device))
    target, draft = (Reader(model, longest) if model is not None else None for model in models)
    assert target is not None
    flags: dict[str, list[list[bool]]] = {rule.name: [] for rule in chosen}
    passages = []
    for text in tqdm(texts, desc="answers", unit="answer", disable=None):
        block = read_block(target, draft, text)
        for rule in chosen:
            found = verdict(block, rule.verify, rule.threshold, None)
            flags[rule.name].append((found.standard | found.rule).tolist())
        if args.html is not None:
            passages.append(Passage(text.question, spans(text, block, found.standard, found.rule, pair.tokenizer)))
    rules: dict[str, dict[str, Any]] = {
        name: {
            "acceptance_rate": sum(map(sum, rows)) / sum(map(len, rows)),
            "mean_accepted": [mean_accepted(rows, M) for M in range(1, LONGEST_BLOCK + 1)],
            "by_place": by_place(rows),
        }
        for name, rows in flags.items()
    }
    if ranks.rank:
        return
    print(tables(rules), file=sys.stderr if args.json else sys.stdout)
    if args.html is not None:
        facts = [
            f"target {pair.target.name}",
            f"rule {chosen[-1].name}",
            f"{len(texts)} answers from {args.data.name if args.data else args.task}",
        ]
        write_text(args.html, page("Who would accept these answers?", facts, passages))
    if args.plot is not None:
        curves = {name: r["mean_accepted"] for name, r in rules.items()}
        curves_figure(args.plot, curves, "tokens drafted a round (M)", "accepted tokens a round (m*)")
    if args.json:
        print(json.dumps({"n": len(texts), "tokens": sum(len(t.answer) for t in texts), "rules": rules}))


if __name__ == "__main__":
    run_cli(main)
