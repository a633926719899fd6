"""Answer a task's problems under several rules and print accuracy, accepted tokens a round and speed of each.

The rules are interleaved problem by problem, so that a machine whose speed drifts treats them alike. With --out every answer
is appended to a file, and a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import demo_task
import torch
from tqdm import tqdm

import checkpoint
from errors import Parser, UserError, read_jsonl, run_cli
from generate import DEMO, RULE, STANDARD, Engine, Output, Sampling, generate
from judge import RULES, Head, check_threshold, default_threshold
from tokenizer import Tokenizer

SHOTS = 4  # worked examples in front of a GSM8K question, from the end of the training file


class Problem(NamedTuple):
    prompt: str
    is_right: Callable[[str], bool]
    stop: tuple[str, ...]


def demo_problems(data: Path | None, limit: int) -> list[Problem]:
    """The demo task's unseen problems."""
    return [Problem(p.question, lambda text, p=p: demo_task.is_right(p, text), ()) for p in demo_task.unseen_problems(limit)]


def question_and_answer(row: Any) -> dict[str, str]:
    """A row of GSM8K's form, checked."""
    if not isinstance(row["question"], str) or not isinstance(row["answer"], str):
        raise ValueError("question and answer must be text")
    return row


def final_number(text: str) -> str | None:
    """What a GSM8K answer ends with: the number after ####, or None."""
    match = re.search(r"####\s*\$?(-?[\d,]*\.?\d+)", text)
    return match.group(1).replace(",", "").removesuffix(".00") if match else None


def without_marks(answer: str) -> str:
    """A GSM8K answer without its calculator marks <<...>>."""
    return re.sub(r"<<.*?>>", "", answer)


def gsm8k_prompt(question: str, shots: list[dict[str, Any]]) -> str:
    """The question behind worked examples."""
    worked = [f"Question: {row['question']}\nAnswer: {without_marks(row['answer'])}\n\n" for row in shots]
    return "".join(worked) + f"Question: {question}\nAnswer:"


def gsm8k_problems(data: Path | None, limit: int) -> list[Problem]:
    """GSM8K with the last SHOTS rows of the file as worked examples (they are not asked)."""
    if data is None:
        raise UserError("--task gsm8k needs --data FILE, a JSON-lines file of question and answer")
    rows = read_jsonl(data, question_and_answer)
    if len(rows) <= SHOTS:
        raise UserError(f"{data} has {len(rows)} rows; {SHOTS} are worked examples, so more are needed")
    shots = rows[-SHOTS:]
    return [
        Problem(
            gsm8k_prompt(row["question"], shots),
            lambda text, row=row: final_number(text) is not None and final_number(text) == final_number(row["answer"]),
            ("\n\n", "Question:"),
        )
        for row in rows[:-SHOTS][:limit]
    ]


class Task(NamedTuple):
    problems: Callable[[Path | None, int], list[Problem]]
    cap: int  # new tokens an answer may have
    raw: bool  # the prompt is a whole text, not to be put into the chat template


TASKS = {"demo": Task(demo_problems, 200, False), "gsm8k": Task(gsm8k_problems, 256, True)}


def encode_problem(tokenizer: Tokenizer, problem: Problem, task: str) -> list[int]:
    """The prompt's ids, through the chat template where the task wants it and there is one."""
    return tokenizer.encode_question(problem.prompt, TASKS[task].raw)


@dataclass(frozen=True)
class Contender:
    """One row of the table: what decodes, and how tokens are accepted."""

    name: str  # as given in --rules
    verify: str
    threshold: float


def parse_rules(text: str, head: Head | None) -> list[Contender]:
    """``plain,draft,standard,judge,topk:5`` to contenders. Raises UserError for an unknown rule or knob, and for a judge without
    a head."""
    contenders = []
    for name in text.split(","):
        kind, _, knob = name.partition(":")
        if kind in ("plain", "draft", "standard") and not knob:
            contenders.append(Contender(name, "standard", 0.0))
            continue
        if kind not in RULES:
            raise UserError(f"--rules names {name!r}; there are plain, draft, standard, {', '.join(RULES)}")
        try:
            threshold = float(knob) if knob else default_threshold(kind, head)
        except ValueError:
            raise UserError(f"--rules names {name!r}; what follows the colon must be a number") from None
        check_threshold(kind, threshold)
        if kind == "judge" and head is None:
            raise UserError("--rules names judge, which needs --judge FILE")
        contenders.append(Contender(name, kind, threshold))
    return contenders


def wilson(right: int, n: int) -> list[float]:
    """95 % interval of a share (Wilson's score interval)."""
    z, p = 1.96, right / n
    middle, half = p + z * z / 2 / n, z * math.sqrt(p * (1 - p) / n + z * z / 4 / n / n)
    return [(middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)]


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact p-value that as many problems were gained as lost, given how many changed."""
    n = gained + lost
    tail = sum(math.comb(n, k) for k in range(min(gained, lost) + 1)) / 2**n
    return min(1.0, 2 * tail)


def answer(engine: Engine, tokenizer: Tokenizer, problem: Problem, task: str) -> dict[str, Any]:
    """Decode one problem and note what the table needs."""
    prompt, cap = encode_problem(tokenizer, problem, task), TASKS[task].cap
    run = generate(engine, prompt, Output(tokenizer, cap, problem.stop))
    ms = {k: sum(now.ms.get(k, 0.0) for now in run.rounds) for k in ("draft", "verify", "other")}
    return {
        "right": problem.is_right(run.output.text), "text": run.output.text, "new_tokens": len(run.output.tokens),
        "rounds": len(run.rounds), "accepted": run.accepted(STANDARD) + run.accepted(RULE), "by_rule": run.accepted(RULE),
        "decode_s": run.decode_s, "ms": ms, "finish_reason": run.output.finish_reason,
    }  # fmt: skip


def row_of(results: list[dict[str, Any]], plain: list[dict[str, Any]] | None) -> dict[str, Any]:
    """A rule's numbers over all problems; differences are paired with ``plain``."""
    n, right = len(results), sum(r["right"] for r in results)
    rounds, tokens = sum(r["rounds"] for r in results), sum(r["new_tokens"] for r in results)
    ms = {k: sum(r["ms"][k] for r in results) for k in ("draft", "verify", "other")}
    row = {
        "accuracy": right / n, "ci95": wilson(right, n), "mean_accepted": sum(r["accepted"] for r in results) / rounds,
        "tokens_per_round": tokens / rounds, "tokens_per_s": statistics.median(r["new_tokens"] / r["decode_s"] for r in results),
        "other_share": ms["other"] / sum(ms.values()), "by_rule_share": sum(r["by_rule"] for r in results) / max(1, tokens),
    }  # fmt: skip
    if plain is not None:
        gained = sum(r["right"] and not p["right"] for r, p in zip(results, plain))
        lost = sum(p["right"] and not r["right"] for r, p in zip(results, plain))
        row |= {"delta_vs_plain": (gained - lost) / n, "p_value": mcnemar(gained, lost)}
    return row


def table(rules: dict[str, dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| rule | accuracy | 95 % | vs plain | p | m* | tokens a round | tokens/s | outside the models |",
             "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for name, r in rules.items():
        low, high = r["ci95"]
        versus = f"{100 * r['delta_vs_plain']:+.1f} | {r['p_value']:.2g}" if "p_value" in r else "|"
        lines.append(
            f"| {name} | {100 * r['accuracy']:.1f} % | {100 * low:.1f}–{100 * high:.1f} | {versus} | {r['mean_accepted']:.2f} | "
            f"{r['tokens_per_round']:.2f} | {r['tokens_per_s']:.1f} | {100 * r['other_share']:.1f} % |"
        )
    return "\n".join(lines)


def read_done(out: Path | None, signature: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """Answers that an earlier run left in ``out``; a last line cut short is dropped. Raises UserError for another run's file."""
    if out is None or not out.exists():
        return {}
    lines = out.read_text(encoding="utf-8").split("\n")
    if lines[-1] != "":
        out.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    rows = [json.loads(line) for line in lines[:-1]]
    if rows and rows[0] != signature:
        raise UserError(f"{out} holds answers of another run ({json.dumps(rows[0])}); choose another --out")
    return {(r["rule"], r["problem"]): r for r in rows[1:]}


def parse_args():
    p = Parser(description=__doc__)
    p.add_argument("--task", choices=TASKS, default="demo", help="what is asked (default: demo)")
    p.add_argument("--data", type=Path, metavar="FILE", help="the task's JSON-lines file; demo needs none")
    p.add_argument("--limit", type=int, default=100, metavar="N", help="problems (default: 100)")
    p.add_argument("--rules", default="plain,draft,standard,judge", metavar="LIST",
                   help="of plain, draft, standard, judge[:δ], topk[:K], typical[:ε], kl[:τ] (default: first four)")  # fmt: skip
    p.add_argument("--target", default=str(DEMO / "target"), metavar="NAME", help="default: the demo's")
    p.add_argument("--draft", default=str(DEMO / "draft"), metavar="NAME", help="default: the demo's")
    p.add_argument("--judge", type=Path, default=None, metavar="FILE", help="judge head (default: the demo's on the demo's target)")
    p.add_argument("--draft-len", type=int, metavar="M", help="for every rule (default: 25, but 8 for the standard test)")
    p.add_argument("--dtype", choices=list(checkpoint.DTYPES), help="default: bfloat16; float32 for the demo pair")
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--no-compile", action="store_true", help="run the blocks uncompiled")
    p.add_argument("--out", type=Path, metavar="FILE", help="append every answer here, and resume from it")
    p.add_argument("--json", action="store_true", help="end stdout with one JSON object; the table goes to stderr")
    args = p.parse_args()
    if args.limit < 1 or (args.draft_len is not None and args.draft_len < 1):
        raise UserError(f"--limit is {args.limit} and --draft-len {args.draft_len}; both must be at least 1")
    if args.target == str(DEMO / "target"):
        args.judge, args.dtype = args.judge or DEMO / "judge.pt", args.dtype or "float32"
    args.dtype = args.dtype or "bfloat16"
    return args


def build_engines(args, contenders: list[Contender], max_len: int, pair: checkpoint.Pair) -> dict[str, Engine]:
    """An engine for each contender, all on the same two models."""
    target, draft = pair.load(checkpoint.DTYPES[args.dtype], args.device)
    assert draft is not None
    engines = {}
    for c in contenders:
        alone = {"plain": target, "draft": draft}.get(c.name)
        if alone is not None:
            engines[c.name] = Engine(alone, sampling=Sampling(), max_len=max_len)
        else:
            M = args.draft_len or (8 if c.verify == "standard" else 25)
            engines[c.name] = Engine(target, draft, draft_len=M, verify=c.verify, threshold=c.threshold, max_len=max_len)
    if not args.no_compile:
        for model in (target, draft):
            model.compile_blocks(dynamic=args.device == "cpu")
    return engines


def main() -> None:
    args = parse_args()
    problems = TASKS[args.task].problems(args.data, args.limit)
    pair = checkpoint.find_pair(args.target, args.draft, args.judge)
    contenders, tokenizer = parse_rules(args.rules, pair.head), pair.tokenizer
    signature = {"task": args.task, "data": args.data and args.data.name, "target": args.target, "draft": args.draft,
                 "judge": args.judge and str(args.judge), "draft_len": args.draft_len, "dtype": args.dtype}  # fmt: skip
    done = read_done(args.out, signature)
    longest = max(len(encode_problem(tokenizer, p, args.task)) for p in problems)
    engines = build_engines(args, contenders, longest + TASKS[args.task].cap, pair)
    for engine in engines.values():
        engine.warm_up()
    if args.out is not None and not done:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(signature) + "\n", encoding="utf-8")
    todo = [(i, c) for i in range(len(problems)) for c in contenders if (c.name, i) not in done]
    for i, c in tqdm(todo, desc=args.task, unit="answer"):
        result = {"rule": c.name, "problem": i, **answer(engines[c.name], tokenizer, problems[i], args.task)}
        done[c.name, i] = result
        if args.out is not None:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result, ensure_ascii=False) + "\n")
    results = {c.name: [done[c.name, i] for i in range(len(problems))] for c in contenders}
    rules = {name: row_of(r, results["plain"] if "plain" in results and name != "plain" else None) for name, r in results.items()}
    print(table(rules), file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps({"task": args.task, "n": len(problems), "rules": rules}))


if __name__ == "__main__":
    run_cli(main)
