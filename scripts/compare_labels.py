"""How far do two files of labels agree? Compares the labels of the same token at the same place of the same answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

from files import read_jsonl
from judge import IGNORE, RIGHT

Place = tuple[str, tuple[int, ...]]  # a question, and the answer's tokens up to the judged one


def labels_of(path: Path) -> dict[Place, int]:
    """The labels in a file, by what was judged. Raises UserError for a line that is not what label.py writes."""

    def parse(row: Any) -> list[tuple[Place, int]]:
        if "skipped" in row:
            return []
        tokens = tuple(row["tokens"])
        own = [((row["question"], tokens[: i + 1]), label) for i, label in enumerate(row["labels"]) if label != IGNORE]
        return own + [((row["question"], (*tokens[:place], token)), label) for place, token, label in row["alternatives"]]

    return {place: label for found in read_jsonl(path, parse) for place, label in found}


def kappa(pairs: list[tuple[int, int]]) -> float:
    """Cohen's: agreement beyond what the shares of right labels would give by chance; 1 where all labels are alike."""
    n = len(pairs)
    agree = sum(a == b for a, b in pairs) / n
    first, second = (sum(pair[side] == RIGHT for pair in pairs) / n for side in (0, 1))
    chance = first * second + (1 - first) * (1 - second)
    return 1.0 if chance == 1 else (agree - chance) / (1 - chance)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("files", type=Path, nargs=2, metavar="FILE", help="what scripts/label.py wrote")
    parser.add_argument("--json", action="store_true", help="end stdout with one JSON object; the text goes to stderr")
    args = parser.parse_args()
    out = sys.stderr if args.json else sys.stdout
    one, two = (labels_of(path) for path in args.files)
    shared = [(label, two[place]) for place, label in one.items() if place in two]
    if not shared:
        raise UserError(f"{args.files[0]} and {args.files[1]} have no label in common")
    agree, k = sum(a == b for a, b in shared), kappa(shared)
    share = [sum(label == RIGHT for label in labels.values()) / len(labels) for labels in (one, two)]
    print(f"{len(one)} and {len(two)} labels, {share[0]:.0%} and {share[1]:.0%} of them right", file=out)
    print(f"{len(shared)} of the same token at the same place: {agree} ({agree / len(shared):.0%}) agree, kappa {k:.2f}", file=out)
    if args.json:
        print(json.dumps({"labels": [len(one), len(two)], "right": share, "shared": len(shared), "agree": agree, "kappa": k}))


if __name__ == "__main__":
    run_cli(main)
