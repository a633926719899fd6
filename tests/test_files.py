"""Files: nothing that isn't ours is touched, nothing is half-written, and every line is read as JSON defines it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

import files
from errors import UserError


def agree(rows):
    pass


@pytest.mark.parametrize("content", [
    b"a note without a line's end", b"a line\n", b"\x80\x04binary\n\x00more", b"[1]\n", b"7\n",
    b'{"a": 1}\n\xff\xfe\n', b"PK\x03\x04",
])  # fmt: skip
def test_a_file_that_is_no_run_of_ours_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "precious"
    path.write_bytes(content)
    with pytest.raises(UserError):
        files.resume_jsonl(path, agree)
    assert path.read_bytes() == content


def test_another_runs_lines_are_left_alone_even_where_the_last_is_cut_short(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"run": 1}\n{"answ')

    def refuse(rows):
        assert rows == [{"run": 1}]
        raise UserError("another run")

    with pytest.raises(UserError, match="another run"):
        files.resume_jsonl(path, refuse)
    assert path.read_bytes() == b'{"run": 1}\n{"answ'
    assert files.resume_jsonl(path, agree) == [{"run": 1}] and path.read_bytes() == b'{"run": 1}\n'
    path.write_bytes(b'{"question": "killed in its first li')
    assert files.resume_jsonl(path, agree) == [] and path.read_bytes() == b""
    assert files.resume_jsonl(tmp_path / "none", agree) == []


@given(st.lists(st.dictionaries(st.text(max_size=4), st.text(max_size=12), max_size=3), min_size=1, max_size=4))
def test_what_is_written_is_read_back_whatever_its_characters(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("rows")
    rows.append({"separators": "\u2028 \u2029 \x85 \x0b \x0c \x1c"})  # which are line ends to str.splitlines
    files.write_jsonl(folder / "a", rows)
    for row in rows:
        files.append_jsonl(folder / "b", row)
    for path in (folder / "a", folder / "b"):
        assert files.read_jsonl(path, lambda row: row) == rows == files.resume_jsonl(path, agree)


def test_a_killed_writer_leaves_the_old_file(tmp_path):
    path = tmp_path / "f.txt"
    files.write_text(path, "old")
    with pytest.raises(KeyboardInterrupt), files.replacing(path) as partial:
        partial.write_text("ne")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_where_nothing_can_be_written_is_told_before_the_work(tmp_path):
    files.check_writable("--out", None)
    files.check_writable("--out", tmp_path / "new")
    with pytest.raises(UserError, match="--out .* is a folder"):
        files.check_writable("--out", tmp_path)
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "x.html", tmp_path / "file" / "new" / "x.html"):
        with pytest.raises(UserError, match="--html .* can't be written there: .*/file is no folder"):
            files.check_writable("--html", path)


def test_folders_are_made_when_there_is_something_to_write_and_not_before(tmp_path):
    for name, write in (("a", lambda path: files.append_jsonl(path, {})), ("b", lambda path: files.write_text(path, "text"))):
        path = tmp_path / name / "deep" / "file"
        files.check_writable("--out", path)
        assert not (tmp_path / name).exists()
        write(path)
        assert path.read_text() in ("{}\n", "text") and list(path.parent.iterdir()) == [path]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_lets_nobody_write_is_told_before_the_work(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match=f"permission denied in {tmp_path}"):
        files.check_writable("--out", tmp_path / "new" / "file")


def test_a_bad_line_is_named(tmp_path):
    path = tmp_path / "d.jsonl"
    for line, words in (
        (b"{", "line 2 is no JSON: "),
        (b"[1]", "line 2: it should be a JSON object"),
        (b'{"a": "\xff"}', "line 2"),
        (b"", "line 2 is no JSON: "),
    ):
        path.write_bytes(json.dumps({"x": 1}).encode() + b"\n" + line + b"\n" + b"{}\n")
        with pytest.raises(UserError, match=words):
            files.read_jsonl(path, lambda row: row)
    path.write_bytes(b"\n")
    with pytest.raises(UserError, match="is empty"):
        files.read_jsonl(path, lambda row: row)


def test_two_processes_never_write_to_one_file(tmp_path):
    path, folder = tmp_path / "lines.jsonl", tmp_path / "folder"
    folder.mkdir()
    files.append_jsonl(path, {"by": "this"})
    files.append_jsonl(folder / ".." / path.name, {"by": "this"})
    handle = files.hold(folder)
    other = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import files
from pathlib import Path
for write in (lambda: files.append_jsonl(Path({str(path)!r}), {{}}), lambda: files.resume_jsonl(Path({str(path)!r}), print),
              lambda: files.hold(Path({str(folder)!r}))):
    try:
        write()
        print("wrote")
    except files.UserError as error:
        print(error)
"""

    def said():
        run = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=True)
        return [line.partition(" writes to ")[0] for line in run.stdout.splitlines()]

    assert said() == ["another process"] * 3
    assert path.read_text() == '{"by": "this"}\n' * 2
    os.close(handle)
    path.unlink()  # begun anew, it is held anew
    files.append_jsonl(path, {"by": "this"})
    assert said() == ["another process"] * 2 + ["wrote"]


def test_a_file_that_could_not_be_held_is_tried_again(tmp_path):
    path = tmp_path / "lines.jsonl"
    files.append_jsonl(path, {})
    path.unlink()
    path.touch()
    other = files.hold(path)  # as another process
    for _ in range(2):
        with pytest.raises(UserError, match="another process"):
            files.append_jsonl(path, {})
    os.close(other)
    files.append_jsonl(path, {"by": "this"})
    assert path.read_text() == '{"by": "this"}\n'
