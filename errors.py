"""The exception that means "the user can mend this", and how a command line reports it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class UserError(Exception):
    """A mistake of the user's: told in one line that names the value and what would be right; exit status 2."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are `UserError`s, so that they too take one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists what there is)")


def read_json(path: Path, missing_ok: bool = False) -> dict[str, Any]:
    """The JSON object in ``path``. Raises UserError when it isn't one, or is missing (with ``missing_ok`` that is {})."""
    if missing_ok and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} should hold a JSON object, not a {type(value).__name__}")
    return value


def read_jsonl(path: Path, parse: Callable[[Any], T]) -> list[T]:
    """What ``parse`` makes of each line of a JSON-lines file; it may raise ValueError, KeyError or TypeError.

    Raises:
        UserError: the file can't be read or is empty, or a line, named by its number, is not what it should be.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} can't be read: {error}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(parse(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else error
            raise UserError(f"{path}, line {number}: {what}") from None
    if not rows:
        raise UserError(f"{path} is empty")
    return rows


def resume_jsonl(path: Path) -> list[Any]:
    """The whole lines of a JSON-lines file that an interrupted run left ([] where there is none); a last line cut short is
    dropped from the file. Raises UserError for a line that isn't JSON."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return read_jsonl(path, lambda row: row) if whole else []


def run_cli(main: Callable[[], None]) -> None:
    """Run a command's `main` and turn the ways it may end early into exit statuses.

    A `UserError` is printed as one line on stderr and exits 2; Ctrl-C exits 130; a closed pipe (`| head`) exits 141, the
    status a shell gives a program killed by SIGPIPE. Anything else is our fault and keeps its traceback (status 1).
    """
    try:
        main()
        sys.stdout.flush()
    except UserError as error:
        line = " ".join(str(error).split())
        print(f"error: {line}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(file=sys.stderr)  # leave the shell's prompt on a line of its own
        sys.exit(130)
    except BrokenPipeError:
        # The interpreter flushes stdout once more on its way out; give it somewhere to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
