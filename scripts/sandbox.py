"""Run generated Python in a process of its own, without network, within limits of time, of memory and of a file's size.

It is kept from other processes and from every network, its own machine's included; it is **not** kept from files that you may
write. As a command this is that process: it gives up what the program must not have, then becomes the program.
"""

from __future__ import annotations

import ctypes
import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from errors import UserError

SECONDS, BYTES = 10, 1 << 30
NEW_USER, NEW_PROCESSES, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000  # of unshare(2)
DIE_WITH_PARENT = 1  # of prctl(2)


def runs(program: str, seconds: int = SECONDS, memory: int = BYTES) -> bool:
    """Whether a program runs to its last line within its limits. What it started is ended with it.

    Raises:
        UserError: this machine can't keep it off the network, so it was not run.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, mark = Path(folder) / "program.py", secrets.token_hex(8)  # an early exit() leaves no mark
        path.write_text(f"{program}\nopen({mark!r}, 'w').close()\n", encoding="utf-8", errors="replace")
        argv = [sys.executable, str(Path(__file__).resolve()), str(path), str(seconds), str(memory)]
        child = subprocess.Popen(
            argv, cwd=folder, env={"PATH": os.environ.get("PATH", "")}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            _, refusal = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            return False
        finished = (Path(folder) / mark).exists()
    if refusal:
        raise UserError(f"generated code can't be cut off from the network here, so it isn't run: {refusal.decode().strip()}")
    return child.returncode == 0 and finished


def confine_and_run(path: str, seconds: int, memory: int) -> None:
    """Give up network, other processes, time and memory; run the program; end as it ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_USER | NEW_PROCESSES | NEW_NETWORK) != 0:
        sys.exit(f"unshare: {os.strerror(ctypes.get_errno())}")
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(0 if status == 0 else 1)
    libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)  # it is the first of its process space, so the rest of that goes with it
    for what, limit in (
        (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 1 << 20), (resource.RLIMIT_CORE, 0)
    ):  # fmt: skip
        most = resource.getrlimit(what)[1]
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(what, (limit, limit))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.execv(sys.executable, [sys.executable, "-I", path])


if __name__ == "__main__":
    confine_and_run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
