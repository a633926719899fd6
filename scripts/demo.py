"""The demo pair on one problem: plain, standard and judge decoding side by side, each token coloured by who accepted it."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

import demo_task
import torch

from checkpoint import find_pair
from engine import Engine, Generation, generate
from generate import COLOURS, RESET, legend
from llm import DEMO
from tokenizer import Output


def coloured(run: Generation) -> str:
    """The text with a colour for each token, where it is read on a terminal."""
    if not sys.stdout.isatty():
        return run.output.text.strip()
    out, at = "", 0
    for end, who in zip(run.output.ends, run.output.accepted_by):
        out += f"{COLOURS[who]}{run.output.text[at:end]}{RESET}"
        at = end
    return out.strip()


def main() -> None:
    p = Parser(description=__doc__)
    p.add_argument("--problem", type=int, default=52, metavar="N", help="which of the 1,000 unseen problems (default: 52)")
    p.add_argument("--repeats", type=int, default=7, metavar="N", help="runs of each, interleaved; medians are shown (default: 7)")
    p.add_argument("--no-compile", action="store_true", help="run the blocks uncompiled")
    args = p.parse_args()
    if not 0 <= args.problem < 1000 or args.repeats < 1:
        raise UserError(f"--problem {args.problem}, --repeats {args.repeats}: 0 to 999, and at least 1")
    problem = demo_task.unseen_problems(args.problem + 1)[-1]
    pair = find_pair(str(DEMO / "target"), str(DEMO / "draft"), DEMO / "judge.pt")
    prompt = pair.tokenizer.encode_question(problem.question)
    target, draft = pair.load(torch.float32)
    assert draft is not None and pair.head is not None
    length = len(prompt) + 200
    engines = {
        "draft alone": Engine(draft, max_len=length),
        "plain": Engine(target, max_len=length),
        "standard": Engine(target, draft, draft_len=8, max_len=length),
        "judge": Engine(target, draft, draft_len=25, verify="judge", threshold=pair.head.threshold, max_len=length),
    }
    if not args.no_compile:
        for model in (target, draft):
            model.compile_blocks(dynamic=True)
    for engine in engines.values():
        engine.warm_up()
    runs: dict[str, list[Generation]] = {name: [] for name in engines}
    for _ in range(args.repeats):
        for name, engine in engines.items():
            runs[name].append(generate(engine, prompt, Output(pair.tokenizer, 200)))
    print(f"question: {problem.question}")
    for name in ("standard", "judge"):
        print(f"\n{name}: {coloured(runs[name][0])}")
    print(f"\n{legend()}\n" if sys.stdout.isatty() else "")
    print(f"{'':12} {'tokens/s':>9} {'m*':>6} {'tokens a round':>15}  answer")
    for name, several in runs.items():
        run, rounds = several[0], len(several[0].rounds)
        said = demo_task.extract_answer(run.output.text)
        verdict = "right" if demo_task.is_right(problem, run.output.text) else f"wrong (it is {problem.answer})"
        speed = statistics.median(r.tokens_per_s for r in several)
        print(f"{name:12} {speed:9.0f} {run.mean_accepted:6.1f} {len(run.output.tokens) / rounds:15.1f}  {said}, {verdict}")


if __name__ == "__main__":
    run_cli(main)
