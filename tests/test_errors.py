"""What a command line does when it ends early."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from errors import Parser, UserError, run_cli

ROOT = Path(__file__).resolve().parent.parent


def failing(error: BaseException):
    def main() -> None:
        raise error

    return main


def test_a_users_mistake_is_one_line_and_status_2(capsys):
    with pytest.raises(SystemExit) as caught:
        run_cli(failing(UserError("--draft-len is 0;\n  it must be at least 1")))
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: --draft-len is 0; it must be at least 1\n"


def test_an_unknown_option_is_a_users_mistake():
    parser = Parser()
    parser.add_argument("--size", type=int)
    with pytest.raises(UserError, match="invalid int value: 'x'"):
        parser.parse_args(["--size", "x"])


def test_interrupted(capsys):
    with pytest.raises(SystemExit) as caught:
        run_cli(failing(KeyboardInterrupt()))
    assert caught.value.code == 130
    assert "Traceback" not in capsys.readouterr().err


def test_our_own_fault_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run_cli(failing(ZeroDivisionError()))


def test_a_closed_pipe_is_quiet():
    code = "from errors import run_cli\nrun_cli(lambda: [print('x' * 80) for _ in range(100000)])"
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait(timeout=30) == 141
