"""Decode random texts on the demo pair for a while, and look for what only time shows.

Prompts, lengths, M, δ, temperatures and stop texts are drawn from a seed, and all go through one ``LLM``, whose caches carry what
texts have in common; some are left half-way. Every greedy text is compared with the naive reference (scripts/naive.py), token for
token, and every drawn one with a fresh engine's. At the end the memory in use must be what it was after the first tenth, to 1 %.
Exit status 1 if anything differed or grew.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

import torch
from demo_task import unseen_problems
from naive import judged
from tqdm import tqdm

from engine import Engine, generate
from llm import LLM, Options
from tokenizer import Output

LEAK = 0.01
ALPHABET = "abc xyz 0123.,?\n€ß漢字🙂<|>"


@dataclass
class Found:
    """What a soak saw."""

    texts: int = 0
    tokens: int = 0
    left: int = 0
    memory: list[int] = field(default_factory=list)  # bytes in use after each text
    faults: list[str] = field(default_factory=list)

    def growth(self) -> float:
        """How far the memory in use grew from the first tenth of the texts to the last, as a share."""
        n = max(1, len(self.memory) // 10)
        return statistics.median(self.memory[-n:]) / statistics.median(self.memory[n : 2 * n] or self.memory[:n]) - 1


def memory_in_use() -> int:
    """Bytes of this process that lie in memory and no file: what a leak would add to."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def draw_prompt(rng: random.Random, llm: LLM, questions: list[str], last: list[int]) -> list[int]:
    """Ids: a question of the task, a part of one, rubbish, or the last text with something behind it."""
    kind = rng.random()
    question = rng.choice(questions)
    if kind < 0.4:
        return llm.encode(question, max_new_tokens=1)
    if kind < 0.6:
        return llm.encode(question[: rng.randrange(1, len(question))], raw=True, max_new_tokens=1)
    if kind < 0.75 or not last:
        text = "".join(rng.choice(ALPHABET) for _ in range(rng.randrange(1, 60)))
        return llm.encode(text, raw=True, max_new_tokens=1)
    return [*last[: rng.randrange(1, len(last) + 1)], *llm.encode(question, raw=True, max_new_tokens=1)[: rng.randrange(1, 20)]]


def draw_options(rng: random.Random, room: int) -> dict[str, Any]:
    """Options for a text of at most ``room`` new tokens."""
    options: dict[str, Any] = {
        "max_new_tokens": rng.randrange(1, room + 1), "draft_len": rng.choice([1, 2, 3, 5, 8, 13, 25, 36]),
        "verify": rng.choice(["standard", "judge", "judge"]),
        "stop": ["".join(rng.choice(ALPHABET) for _ in range(rng.randrange(1, 4))) for _ in range(rng.choice([0, 0, 1, 2]))],
    }  # fmt: skip
    if options["verify"] == "judge":
        options["threshold"] = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0, round(rng.random(), 3)])
    if rng.random() < 0.4:
        options |= {"temperature": round(rng.uniform(0.1, 2.0), 2), "seed": rng.randrange(1 << 40)}
        options |= rng.choice([{}, {}, {"top_k": rng.randrange(1, 50)}, {"top_p": round(rng.uniform(0.1, 1.0), 2)}])
    return options


def expected(llm: LLM, prompt: list[int], options: dict[str, Any]) -> Output:
    """The text by the naive reference, or where tokens are drawn by an engine that has seen nothing else."""
    o = llm.settled(Options(**options))
    output = Output(llm.tokenizer, o.max_new_tokens, o.stop)
    assert llm.draft is not None
    if o.temperature > 0:
        fresh = Engine(llm.target, llm.draft, draft_len=int(o.draft_len or 0), verify=str(o.verify),
                       threshold=o.threshold or 0.0, sampling=o.sampling, max_len=llm.context)  # fmt: skip
        return generate(fresh, prompt, output, o.seed).output
    head = llm.pair.head if o.verify == "judge" else None
    text = list(prompt)
    while not output.finish_reason:  # a round at a time: most texts end long before their cap
        tokens, who = judged(llm.target, llm.draft, text, 1, int(o.draft_len or 0), head, o.threshold or 0.0)
        output.add(tokens, who)
        text += tokens
    return output


@torch.inference_mode()
def one(llm: LLM, rng: random.Random, questions: list[str], last: list[int], found: Found) -> list[int]:
    """Decode a text and compare it. Returns it, prompt included."""
    prompt = draw_prompt(rng, llm, questions, last)[-(llm.context - 8) :]
    options = draw_options(rng, min(120, llm.context - len(prompt)))
    stream = llm.stream(prompt, **options)
    leave = rng.randrange(1, 12) if rng.random() < 0.15 else 0
    pieces = []
    for piece in stream:
        pieces.append(piece.text)
        if len(pieces) == leave:
            break
    got, wanted = stream.result.output, expected(llm, prompt, options)
    found.texts, found.tokens = found.texts + 1, found.tokens + len(got.tokens)
    if len(pieces) == leave:  # though the text may have been complete: its pieces were not all taken
        found.left += 1
        same = wanted.text.startswith("".join(pieces))
    else:
        same = (got.tokens, got.text, got.accepted_by, got.finish_reason) == (
            wanted.tokens, wanted.text, wanted.accepted_by, wanted.finish_reason,
        ) and "".join(pieces) == wanted.text  # fmt: skip
    if not same:
        found.faults.append(f"{options} after {prompt}: {got.text!r}, expected {wanted.text!r}")
    found.memory.append(memory_in_use())
    return prompt + got.tokens


def soak(seconds: float, seed: int, llm: LLM) -> Found:
    """Decode texts until the time is over or something differs."""
    rng, found, last = random.Random(seed), Found(), list[int]()
    questions = [problem.question for problem in unseen_problems(200)]
    start = time.monotonic()
    with tqdm(total=round(seconds), unit="s", desc="soak", disable=None) as bar:
        while (spent := time.monotonic() - start) < seconds and not found.faults:
            last = one(llm, rng, questions, last, found)
            bar.update(int(spent) - bar.n)
    return found


def main() -> None:
    p = Parser(description=__doc__)
    p.add_argument("--minutes", type=float, default=30.0, metavar="N", help="how long (default: 30)")
    p.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    p.add_argument("--context", type=int, default=400, metavar="N", help="tokens a text may have (default: 400)")
    p.add_argument("--json", action="store_true", help="end stdout with one JSON object, behind the text")
    args = p.parse_args()
    if not 0 < args.minutes < 1e4:
        raise UserError(f"--minutes is {args.minutes:g}; it must be above 0")
    if args.context < 64:
        raise UserError(f"--context is {args.context}; it must be at least 64")
    found = soak(60 * args.minutes, args.seed, LLM(context=args.context, compile=False))
    for fault in found.faults:
        print(f"differs: {fault}")
    grown = found.growth()
    print(
        f"{found.texts} texts ({found.left} left half-way), {found.tokens} tokens: {len(found.faults)} differ; memory in use "
        f"{found.memory[-1] / 1e6:.0f} MB, {100 * grown:+.2f} % since the first tenth"
    )  # fmt: skip
    if args.json:
        print(
            json.dumps({"texts": found.texts, "left": found.left, "tokens": found.tokens, "faults": found.faults, "growth": grown})
        )
    if found.faults or grown > LEAK:
        sys.exit(1)


if __name__ == "__main__":
    run_cli(main)
