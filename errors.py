"""The exception that means "the user can mend this", and how a command line reports it."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import NoReturn


class UserError(Exception):
    """A mistake of the user's: told in one line that names the value and what would be right; exit status 2.

    What can be made from Python too names a parameter in backticks: `draft_len`.

    ``shared``: where several ranks run all of them see it, so that only the first on each machine tells it.
    """

    shared = True

    def line(self) -> str:
        """The message as a command tells it: in one line, each parameter as the option of its name, --draft-len."""
        return re.sub(r"`(\w+)`", lambda found: "--" + found[1].replace("_", "-"), " ".join(str(self).split()))


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are `UserError`s, so that they too take one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists what there is)")


def _leave(*_: object) -> NoReturn:
    os._exit(130)


def quiet_start(name: str) -> None:
    """Let Ctrl-C end a command quietly while it still imports, which takes seconds; ``run_cli`` then hears it as an exception.

    Args:
        name: the module's: a command that is itself imported changes nothing.
    """
    if name == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def run_cli(main: Callable[[], None]) -> None:
    """Run a command's `main` and turn the ways it may end early into exit statuses.

    A `UserError`, and a file that the system refuses, is printed as one line on stderr and exits 2; Ctrl-C exits 130; a closed
    pipe (`| head`) exits 141, the status a shell gives a program killed by SIGPIPE. Anything else is our fault and keeps its
    traceback (status 1), on every rank.
    """
    stderr = sys.stderr
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
        sys.stdout.flush()
    except UserError as error:
        if not error.shared or os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error.line()}", file=stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(file=sys.stderr)  # leave the shell's prompt on a line of its own
        sys.exit(130)
    except BrokenPipeError:
        # The interpreter flushes stdout once more on its way out; give it somewhere to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if error.filename is None:
            sys.stderr = stderr
            raise
        print(f"error: {error.filename}: {error.strerror}", file=stderr)
        sys.exit(2)
    except Exception:
        sys.stderr = stderr
        raise
