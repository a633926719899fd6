"""Answer a task's problems under several rules and print accuracy, accepted tokens a round and speed of each.

The rules are interleaved problem by problem, so that a machine whose speed drifts treats them alike. With --out every answer
is appended to a file, and a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

from plots import Point, check_plot, trade_off_figure
from tasks import TASKS, Problem, encode, read_problems
from tqdm import tqdm

import checkpoint
from engine import RULE, STANDARD, Engine, Generation, cache_length, generate
from files import append_jsonl, check_writable, resume_jsonl, write_jsonl
from judge import RULES, Head, check_threshold, default_threshold, rules_with_knobs
from llm import DEMO, default_dtype, is_demo
from tokenizer import Output, Tokenizer
from tp import Ranks, default_device, ranks_of, told


@dataclass(frozen=True)
class Contender:
    """One row of the table: what decodes, and how tokens are accepted."""

    name: str  # as given in --rules
    verify: str
    threshold: float
    draft_len: int  # M; 0 where a model decodes alone
    head: Head | None = None  # the judge's


def check_once(names: list[str]) -> None:
    """Raises UserError for a rule that --rules names twice."""
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--rules names {name!r} twice")


def parse_rules(text: str, heads: dict[str, Head], draft_len: int | None = None) -> list[Contender]:
    """``plain,draft,standard@25,judge,topk:5`` to contenders; with several heads there is a judge of each.

    Args:
        draft_len: M of what says none behind an @; None: 25, but 8 for the standard test.

    Raises:
        UserError: an unknown rule, knob or M, the same twice, or a judge without a head.
    """
    contenders: list[Contender] = []
    names = text.split(",")
    check_once(names)
    for name in names:
        rule, at, length = name.partition("@")
        kind, _, knob = rule.partition(":")
        if kind in ("plain", "draft") and at:
            raise UserError(f"--rules names {name!r}; a model that decodes alone drafts nothing")
        if at and not (length.isdecimal() and int(length) >= 1):
            raise UserError(f"--rules names {name!r}; @M must be a whole number of at least 1")
        if kind in ("plain", "draft", "standard") and not knob:
            M = 0 if kind != "standard" else int(length or draft_len or 8)
            contenders.append(Contender(name, "standard", 0.0, M))
            continue
        if kind not in RULES:
            raise UserError(f"--rules names {name!r}; there are plain, draft, standard, {', '.join(RULES)}")
        if kind == "judge" and not heads:
            raise UserError("--rules names judge, which needs --judge FILE")
        for stem, head in heads.items() if kind == "judge" else [("", None)]:
            try:
                threshold = float(knob) if knob else default_threshold(kind, head)
            except ValueError:
                raise UserError(f"--rules names {name!r}; what follows the colon must be a number") from None
            check_threshold(kind, threshold)
            full = f"{name}[{stem}]" if head is not None and len(heads) > 1 else name
            contenders.append(Contender(full, kind, threshold, int(length or draft_len or 25), head))
    return contenders


def wilson(right: int, n: int) -> list[float]:
    """95 % interval of a share (Wilson's score interval)."""
    z, p = 1.96, right / n
    middle, half = p + z * z / 2 / n, z * math.sqrt(p * (1 - p) / n + z * z / 4 / n / n)
    low, high = (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)
    return [max(0.0, min(low, p)), min(1.0, max(high, p))]  # rounding can put an end of 0 or 1 beyond, or short of it


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact p-value that as many problems were gained as lost, given how many changed."""
    n = gained + lost
    tail = sum(math.comb(n, k) for k in range(min(gained, lost) + 1)) / 2**n
    return min(1.0, 2 * tail)


def answer(engine: Engine, tokenizer: Tokenizer, problem: Problem, task: str) -> dict[str, Any]:
    """Decode one problem, turn by turn, and note what the table needs."""
    runs: list[Generation] = []
    for _ in problem.turns:
        prompt = encode(tokenizer, problem, task, tuple(run.output.text for run in runs))
        room = engine.max_len - len(prompt)  # a second turn follows an answer of any length
        runs.append(generate(engine, prompt, Output(tokenizer, min(TASKS[task].cap, room), problem.stop)))
    ms = {k: sum(now.ms.get(k, 0.0) for run in runs for now in run.rounds) for k in ("draft", "verify", "other")}
    texts = [run.output.text for run in runs]
    return {
        "right": told(functools.partial(problem.is_right, texts[-1])) if problem.is_right is not None else None, "texts": texts,
        "new_tokens": sum(len(run.output.tokens) for run in runs), "rounds": sum(len(run.rounds) for run in runs),
        "accepted": sum(run.accepted(STANDARD) + run.accepted(RULE) for run in runs),
        "by_rule": sum(run.accepted(RULE) for run in runs), "decode_s": sum(run.decode_s for run in runs), "ms": ms,
        "finish_reason": runs[-1].output.finish_reason,
    }  # fmt: skip


def row_of(results: list[dict[str, Any]], plain: list[dict[str, Any]] | None) -> dict[str, Any]:
    """A rule's numbers over all problems; differences are paired with ``plain``."""
    n, checked = len(results), all(r["right"] is not None for r in results)
    right = sum(r["right"] for r in results) if checked else 0
    rounds, tokens = sum(r["rounds"] for r in results), sum(r["new_tokens"] for r in results)
    ms = {k: sum(r["ms"][k] for r in results) for k in ("draft", "verify", "other")}
    row = {
        "accuracy": right / n if checked else None,
        "ci95": wilson(right, n) if checked else None,
        "mean_accepted": sum(r["accepted"] for r in results) / rounds,
        "tokens_per_round": tokens / rounds,
        "tokens_per_s": statistics.median(r["new_tokens"] / r["decode_s"] for r in results),
        "other_share": ms["other"] / sum(ms.values()),
        "by_rule_share": sum(r["by_rule"] for r in results) / max(1, tokens),
    }
    if plain is not None and checked:
        gained = sum(r["right"] and not p["right"] for r, p in zip(results, plain))
        lost = sum(p["right"] and not r["right"] for r, p in zip(results, plain))
        row |= {"delta_vs_plain": (gained - lost) / n, "p_value": mcnemar(gained, lost)}
    return row


def table(rules: dict[str, dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| rule | accuracy | 95 % | vs plain | p | m* | tokens a round | tokens/s | outside the models |",
             "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for name, r in rules.items():
        right = "—", "—"
        if r["ci95"] is not None:
            right = f"{100 * r['accuracy']:.1f} %", "–".join(f"{100 * end:.1f}" for end in r["ci95"])
        versus = f"{100 * r['delta_vs_plain']:+.1f} | {r['p_value']:.2g}" if "p_value" in r else "|"
        lines.append(
            f"| {name} | {' | '.join(right)} | {versus} | {r['mean_accepted']:.2f} | "
            f"{r['tokens_per_round']:.2f} | {r['tokens_per_s']:.1f} | {100 * r['other_share']:.1f} % |"
        )
    return "\n".join(lines)


def digest(value: Any) -> str:
    """A short name for anything JSON can write."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def identity(contender: Contender) -> str:
    """What decides a contender's answers, as text: answers kept under it are its own, whatever it was called."""
    head = contender.head
    who = contender.name if contender.name in ("plain", "draft") else contender.verify
    parts = [who, repr(contender.threshold), f"M={contender.draft_len}"]
    if head is not None:
        parts.append(digest([head.weight.tolist(), head.bias, head.kind, head.floor, *([head.log_p] if head.log_p else [])]))
    return " ".join(parts)


def read_done(out: Path | None, signature: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Answers that an earlier run left in ``out``, by contender and problem. A new file is begun with the signature.

    Raises:
        UserError: the file is another run's.
    """

    def check(rows: list[dict[str, Any]]) -> None:
        if rows and rows[0] != signature:
            raise UserError(f"{out} holds answers of another run ({json.dumps(rows[0])}); choose another --out")

    def rows_of(path: Path) -> list[dict[str, Any]]:
        rows = resume_jsonl(path, check)
        if not rows:
            append_jsonl(path, signature)
        return rows

    rows = [] if out is None else told(lambda: rows_of(out))
    return {(r["rule"], r["problem"]): r for r in rows[1:]}


def plot(path: Path, contenders: list[Contender], rules: dict[str, dict[str, Any]]) -> None:
    """Accuracy against speed: a family of points for each rule, one point for each setting of its knob."""
    families: dict[str, list[Point]] = {}
    for c in contenders:
        r = rules[c.name]
        if r["ci95"] is not None:
            family = c.verify + "".join(re.findall(r"\[.*\]", c.name)) if c.draft_len else c.name  # each head apart
            knob = f"{c.threshold:.2g}" if c.verify in RULES else ""
            label = knob + (f"@{c.draft_len}" if "@" in c.name or not knob else "")
            families.setdefault(family, []).append(Point(label, r["tokens_per_s"], r["accuracy"], *r["ci95"]))
    trade_off_figure(path, families, "tokens/s", "accuracy (with 95 % intervals)")


def write_answers(folder: Path, problems: list[Problem], results: dict[str, list[dict[str, Any]]]) -> None:
    """Each rule's answers in the form that FastChat's judge of MT-Bench reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, answers in results.items():
        model = name.replace(":", "-")
        lines = [
            {
                "question_id": problem.id, "answer_id": f"{model}-{problem.id}", "model_id": model,
                "choices": [{"index": 0, "turns": done["texts"]}], "tstamp": time.time(),
            }
            for problem, done in zip(problems, answers)
        ]  # fmt: skip
        write_jsonl(folder / f"{model}.jsonl", lines)


def parse_args():
    p = Parser(description=__doc__)
    p.add_argument("--task", choices=TASKS, default="demo", help="what is asked (default: demo)")
    p.add_argument("--data", type=Path, metavar="FILE", help="the task's JSON-lines file; demo needs none")
    p.add_argument("--limit", type=int, default=100, metavar="N", help="problems (default: 100)")
    p.add_argument("--rules", default="plain,draft,standard,judge", metavar="LIST",
                   help=f"of plain, draft, standard, {rules_with_knobs()}, each that drafts with @M where it is to have a "
                   "length of its own (default: plain,draft,standard,judge)")  # fmt: skip
    p.add_argument("--target", default=str(DEMO / "target"), metavar="NAME", help="default: the demo's")
    p.add_argument("--draft", default=str(DEMO / "draft"), metavar="NAME", help="default: the demo's")
    p.add_argument("--judge", type=Path, nargs="+", default=[], metavar="FILE",
                   help="judge heads; with several there is a row for each (default: the demo's on the demo's target)")  # fmt: skip
    p.add_argument(
        "--draft-len",
        type=int,
        metavar="M",
        help="tokens drafted a round, for rules without @M (default: 25, but 8 for the standard test)",
    )
    p.add_argument("--dtype", choices=list(checkpoint.DTYPES), help="default: bfloat16; float32 for the demo pair")
    p.add_argument("--device", choices=["cuda", "cpu"], default=default_device(), help="default: cuda where there is one")
    p.add_argument("--no-compile", action="store_true", help="run the blocks uncompiled")
    p.add_argument("--out", type=Path, metavar="FILE", help="append every answer here, and resume from it")
    p.add_argument("--answers", type=Path, metavar="DIR", help="write mt-bench answers here, a file for each rule, as FastChat's")
    p.add_argument("--plot", type=Path, metavar="FILE", help="write accuracy against speed as a picture (needs matplotlib)")
    p.add_argument("--json", action="store_true", help="end stdout with one JSON object; the table goes to stderr")
    args = p.parse_args()
    if args.draft_len is not None and args.draft_len < 1:
        raise UserError(f"--draft-len is {args.draft_len}; it must be at least 1")
    check_writable("--out", args.out)
    check_plot(args.plot)
    if args.answers is not None and args.task != "mt-bench":
        raise UserError(f"--answers is for --task mt-bench, not {args.task}")
    args.dtype = args.dtype or default_dtype(args.target)
    if is_demo(args.target):
        args.judge = args.judge or [DEMO / "judge.pt"]
    return args


def build_engines(args, contenders: list[Contender], max_len: int, pair: checkpoint.Pair) -> dict[str, Engine]:
    """An engine for each contender, all on the same two models but for the output projections that carry the heads, and on the same
    caches: what one has read of a problem the next need not."""
    target, draft = pair.load(checkpoint.DTYPES[args.dtype], args.device)
    assert draft is not None
    if not args.no_compile:
        for model in (target, draft):
            model.compile_blocks(dynamic=args.device == "cpu")
    length = cache_length(max_len, max(c.draft_len for c in contenders), 1)
    caches = target.new_cache(length), draft.new_cache(length)
    engines = {}
    for c in contenders:
        if c.name in ("plain", "draft"):
            alone, cache = (target, caches[0]) if c.name == "plain" else (draft, caches[1])
            engines[c.name] = Engine(alone, max_len=max_len, caches=(cache, None))
            continue
        judging = target if c.head is None else c.head.on(target)
        engines[c.name] = Engine(
            judging, draft, draft_len=c.draft_len, verify=c.verify, threshold=c.threshold, max_len=max_len, caches=caches,
        )  # fmt: skip
    return engines


def main() -> None:
    args = parse_args()
    with ranks_of(args.device) as ranks:
        run(args, ranks)


def run(args, ranks: Ranks) -> None:
    """Answer the problems, as one of the ranks; rank 0 writes the files."""
    problems = read_problems(args.task, args.data, args.limit)
    pair = checkpoint.find_pair(args.target, args.draft)
    heads = {path.stem: checkpoint.head_for(pair.target, path) for path in args.judge}
    if len(heads) < len(args.judge):
        raise UserError(f"--judge names two files of one name: {', '.join(str(path) for path in args.judge)}")
    contenders, tokenizer, cap = parse_rules(args.rules, heads, args.draft_len), pair.tokenizer, TASKS[args.task].cap
    assert pair.draft is not None
    signature = {
        "task": args.task, "target": checkpoint.fingerprint(pair.target), "draft": checkpoint.fingerprint(pair.draft),
        "dtype": args.dtype, "device": args.device, "compile": not args.no_compile,
    } | ({"ranks": ranks.size} if ranks.size > 1 else {})  # fmt: skip
    done = read_done(args.out, signature)
    keys, names = {c.name: identity(c) for c in contenders}, [digest(p.turns) for p in problems]
    longest = max(len(encode(tokenizer, p, args.task, ("",) * turn)) + turn * cap for p in problems for turn in range(len(p.turns)))
    asked = {(keys[c.name], name): (c, problem) for name, problem in zip(names, problems) for c in contenders}
    todo = {key: work for key, work in asked.items() if key not in done}  # standard and standard@8 are one
    asking = list({c.name: c for c, _ in todo.values()}.values())
    engines = build_engines(args, asking, min(longest + cap, pair.context), pair) if asking else {}
    for engine in engines.values():
        engine.warm_up()
    for (rule, name), (c, problem) in tqdm(todo.items(), desc=args.task, unit="answer", disable=None):
        result = {"rule": rule, "problem": name, **answer(engines[c.name], tokenizer, problem, args.task)}
        done[rule, name] = result
        if args.out is not None and ranks.rank == 0:
            append_jsonl(args.out, result)
    results = {rule: [done[key, name] for name in names] for rule, key in keys.items()}
    rules = {name: row_of(r, results["plain"] if "plain" in results and name != "plain" else None) for name, r in results.items()}
    if ranks.rank:
        return
    print(table(rules), file=sys.stderr if args.json else sys.stdout)
    if args.plot is not None:
        plot(args.plot, contenders, rules)
    if args.answers is not None:
        write_answers(args.answers, problems, results)
    if args.json:
        print(json.dumps({"task": args.task, "n": len(problems), "rules": rules}))


if __name__ == "__main__":
    run_cli(main)
