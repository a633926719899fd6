"""Write docs/commands.md: every command's help, as --help prints it."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

from files import write_text

OUT = ROOT / "docs" / "commands.md"


class Parsed(BaseException):
    """Raised in the place of a command's work, once its command line was understood."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def command_files() -> Iterator[Path]:
    """The programs that take a command line, the main one first."""
    yield ROOT / "generate.py"
    for folder in (ROOT, ROOT / "scripts"):
        for path in sorted(folder.glob("*.py")):
            if path.name != "generate.py" and "Parser(" in path.read_text(encoding="utf-8") and path.name != "errors.py":
                yield path


def parse(path: Path, argv: list[str], only: bool = False) -> argparse.ArgumentParser:
    """Let a command read a command line, and do no more.

    Args:
        only: give its parser, whatever ``argv`` lacks.

    Raises:
        SystemExit: the command line is refused.
    """
    original, before = Parser.parse_args, sys.argv

    def stop(self: Parser, *args: Any, **options: Any) -> NoReturn:
        if not only:
            original(self, *args, **options)
        raise Parsed(self)

    try:
        setattr(Parser, "parse_args", stop)  # noqa: B010  a method that doesn't return suits no type checker
        sys.argv = [path.name, *argv]
        runpy.run_path(str(path), run_name="__main__")
    except Parsed as parsed:
        return parsed.parser
    finally:
        setattr(Parser, "parse_args", original)  # noqa: B010
        sys.argv = before
    raise UserError(f"{path} parses no command line")


def helps(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The help of a parser, and of the commands within it."""
    yield parser.format_help()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield inner.format_help()


def document() -> str:
    """The page."""
    os.environ["COLUMNS"] = "118"  # argparse folds to the terminal's width
    parts = ["# Every command's options\n\nWhat `--help` prints, put together by `python scripts/commands.py`.\n"]
    for path in command_files():
        text = "\n".join(text.strip() + "\n" for text in helps(parse(path, [], only=True)))
        parts.append(f"## {path.relative_to(ROOT)}\n\n```\n{text.strip()}\n```\n")
    return "\n".join(parts)


def main() -> None:
    Parser(description=__doc__).parse_args()
    write_text(OUT, document())


if __name__ == "__main__":
    run_cli(main)
