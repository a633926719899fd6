"""Files as the commands read and write them: JSON, JSON lines that a run is resumed from, and nothing half-written."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from errors import UserError

T = TypeVar("T")
# what a checkpoint has beside its configuration and weights
SIDE_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


def read_json(path: Path, missing_ok: bool = False) -> dict[str, Any]:
    """The JSON object in ``path``. Raises UserError when it isn't one, or is missing (with ``missing_ok`` that is {})."""
    if missing_ok and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} can't be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} should hold a JSON object, not a {type(value).__name__}")
    return value


def _parse_lines(path: Path, data: bytes, parse: Callable[[Any], T]) -> list[T]:
    rows = []
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n"), 1):
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number} is no JSON: {error}") from None
        try:
            if not isinstance(row, dict):
                raise ValueError(f"it should be a JSON object, not a {type(row).__name__}")
            rows.append(parse(row))
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else error
            raise UserError(f"{path}, line {number}: {what}") from None
    return rows


def read_jsonl(path: Path, parse: Callable[[dict[str, Any]], T]) -> list[T]:
    """What ``parse`` makes of each object of a JSON-lines file; it may raise ValueError, KeyError, TypeError or IndexError.

    Raises:
        UserError: the file can't be read or is empty, or a line, named by its number, is not what it should be.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} can't be read: {error}") from None
    if not data.strip():
        raise UserError(f"{path} is empty")
    return _parse_lines(path, data, parse)


def resume_jsonl(path: Path, check: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """The whole lines that an interrupted run left ([] where there is no file); a last line cut short is then cut off.

    Args:
        check: raises UserError for lines that another run wrote. Nothing is changed before it has agreed.

    Raises:
        UserError: the file holds anything but JSON lines, or another process writes to it.
    """
    if not path.exists():
        return []
    try:
        _hold_lines(path)
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} can't be read: {error}") from None
    whole = data[: data.rfind(b"\n") + 1]
    if data and not whole and not data.startswith(b'{"'):
        raise UserError(f"{path} was not written by an earlier run of this command; choose another file")
    rows = _parse_lines(path, whole, lambda row: row) if whole else []
    check(rows)
    if whole != data:
        os.truncate(path, len(whole))
    return rows


def append_jsonl(path: Path, row: dict[str, Any]) -> None:
    """Add a line to a JSON-lines file, which is made with its folders if it isn't there. It is this process's from then on, to its
    end.

    Raises:
        UserError: another process writes to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        _hold_lines(path)
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def hold(path: Path) -> int:
    """Keep other processes from a file or a folder that is written to, until the descriptor that is returned is closed.

    Raises:
        UserError: another process holds it.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(f"another process writes to {path}; wait for it or choose another --out") from None
    except OSError:
        pass  # some network file systems know no such lock
    return handle


_held: dict[Path, int] = {}  # files of lines that this process writes


def _hold_lines(path: Path) -> None:
    name = path.resolve()  # a lock is in the way of this process, too, under another name
    handle = _held.get(name)
    if handle is not None and os.path.samestat(os.fstat(handle), path.stat()):
        return
    if handle is not None:
        os.close(_held.pop(name))  # of a file that is there no more
    _held[name] = hold(path)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write under; when the block ends well the file gets its own, in place of any that was there. Its folders are made.

    It is in a folder of its own: safetensors writes under yet another name first, which a kill would leave lying about.
    """
    folder = path.with_name(path.name + ".partial")
    remove(folder)
    folder.mkdir(parents=True)
    partial = folder / path.name
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())  # what has the name must be whole even if the machine goes down
        os.replace(partial, path)
    finally:
        remove(folder)


def remove(path: Path) -> None:
    """Remove a file or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file or none."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="replace")  # a command line may hold bytes that aren't UTF-8


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file under a temporary name, then rename it."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a whole JSON-lines file or none."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def check_room(folder: Path, needed: int) -> None:
    """Raises UserError where a folder's disk has fewer bytes free than are still to be written there."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(f"{folder} needs {needed / 1e9:.1f} GB more, and its disk has {free / 1e9:.1f} GB free")


def check_writable(option: str, path: Path | None) -> None:
    """Raises UserError where a file can't be written, or the folders it is to lie in can't be made, before any work is done for it.
    None is fine."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; give a file's name")
    there = path if path.exists() else next(folder for folder in path.absolute().parents if folder.exists())
    if there != path and not there.is_dir():
        raise UserError(f"{option} {path} can't be written there: {there} is no folder")
    if not os.access(there, os.W_OK):
        raise UserError(f"{option} {path} can't be written there: permission denied in {there}")
