"""Judge tuples from GSM8K-style answers, labelled by construction: in each, one computed number is replaced by another.

The right answer is the file's own; the wrong one is the same up to a number that follows an equals sign, which is changed.
The mistake reaches from the first changed digit to the number's end, so nobody has to read anything.
"""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

from tasks import SHOTS, gsm8k_prompt, question_and_answer, without_marks

from files import check_writable, read_jsonl, write_jsonl

COMPUTED = re.compile(r"(?<==)(\s*\$?)(\d+)(?![\d.,]*\d)")


def other_number(text: str, rng: random.Random) -> str:
    """A number of as many digits that differs in one or more of them."""
    at = rng.randrange(len(text))
    digit = rng.choice([d for d in "0123456789" if d != text[at] and not (at == 0 and d == "0" and len(text) > 1)])
    tail = text[at + 1 :] if rng.random() < 0.5 else "".join(rng.choice("0123456789") for _ in text[at + 1 :])
    return text[:at] + digit + tail


def plant(answer: str, rng: random.Random) -> tuple[str, tuple[int, int]] | None:
    """An answer with one computed number changed, and the characters of the change; None where it computes nothing."""
    places = list(COMPUTED.finditer(answer))
    if not places:
        return None
    place = rng.choice(places)
    right, wrong = place.group(2), other_number(place.group(2), rng)
    first = next(i for i, (a, b) in enumerate(zip(right, wrong)) if a != b)
    start, end = place.span(2)
    return answer[:start] + wrong + answer[end:], (start + first, end)


def main() -> None:
    p = Parser(description=__doc__)
    p.add_argument("data", type=Path, help="JSON lines of question and answer, as GSM8K's")
    p.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON lines of tuples; train with --raw")
    p.add_argument("--limit", type=int, default=500, metavar="N", help="tuples (default: 500)")
    p.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    args = p.parse_args()
    check_writable("--out", args.out)
    rows = read_jsonl(args.data, question_and_answer)
    if args.limit < 1 or len(rows) <= SHOTS:
        raise UserError(f"--limit is {args.limit} and {args.data} has {len(rows)} rows; at least 1 and {SHOTS + 1} are needed")
    rng = random.Random(args.seed)
    rows_out: list[dict[str, Any]] = []
    for row in rows[:-SHOTS]:
        answer = " " + without_marks(row["answer"])
        planted = plant(answer, rng)
        if planted is not None and len(rows_out) < args.limit:
            wrong, mistake = planted
            prompt = gsm8k_prompt(row["question"], rows[-SHOTS:])
            rows_out.append({"question": prompt, "correct": answer, "wrong": wrong, "mistake": mistake})
    write_jsonl(args.out, rows_out)
    print(f"wrote {len(rows_out)} tuples to {args.out}")


if __name__ == "__main__":
    run_cli(main)
