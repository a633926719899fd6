"""Is a checkpoint still what was written? Reads every weight once and compares it with its checksum, which loading doesn't."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

import checkpoint


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("checkpoints", nargs="+", metavar="NAME", help="a checkpoint's folder, or its name under checkpoints/")
    for folder in map(checkpoint.find_checkpoint, parser.parse_args().checkpoints):
        compared = checkpoint.verify(folder)
        if not compared:
            raise UserError(f"{folder} was written before there were checksums; convert it again to have some")
        print(f"{folder}: {compared} weights are what was written")


if __name__ == "__main__":
    run_cli(main)
