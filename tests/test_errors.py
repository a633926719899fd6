"""What a command line does when it ends early."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import heed_interrupts

from errors import Parser, UserError, run_cli

ROOT = Path(__file__).resolve().parent.parent
FILES = [*ROOT.glob("*.py"), *(ROOT / "scripts").glob("*.py")]
COMMANDS = [path for path in FILES if "run_cli(main)" in path.read_text(encoding="utf-8")]


def failing(error: BaseException):
    def main() -> None:
        raise error

    return main


def test_a_users_mistake_is_one_line_and_status_2(capsys):
    with pytest.raises(SystemExit) as caught:
        run_cli(failing(UserError("--draft-len is 0;\n  it must be at least 1")))
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: --draft-len is 0; it must be at least 1\n"


def test_a_command_calls_a_parameter_by_its_option():
    error = UserError("`max_new_tokens` is 0;\n  `verify` `x y`")
    assert error.line() == "--max-new-tokens is 0; --verify `x y`" and str(error).startswith("`max_new_tokens` is 0")


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


@pytest.mark.parametrize("program", ["generate.py", "scripts/serve.py"])
def test_interrupted_while_torch_loads(tmp_path, program):
    """A torch that presses Ctrl-C takes its place."""
    (tmp_path / "torch.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, program], cwd=ROOT, env=env, capture_output=True, preexec_fn=heed_interrupts)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_every_command_is_quiet_while_torch_loads(path):
    before = path.read_text(encoding="utf-8").split("quiet_start(__name__)\n")[0]
    imported = set(re.findall(r"^(?:import|from) (\w+)", before, re.M))
    assert imported - {"__future__", "errors"} <= sys.stdlib_module_names


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_progress_is_drawn_on_terminals_only(path):
    text = path.read_text(encoding="utf-8")
    assert len(re.findall(r"\btqdm\(", text)) == text.count("disable=None")
