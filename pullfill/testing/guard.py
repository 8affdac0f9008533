"""Runs a command for a program that may die at any moment: `python -m pullfill.testing.guard CMD…`.

The guard ends the command in order when its standard input is closed. The kernel closes it however
the program on the other end of the pipe ends. So a killed test run leaves no cluster behind.

The guard belongs in a session of its own, so that Ctrl-C reaches only the program.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress


def run(command: Sequence[str], stdin: int = 0) -> int:
    """Run the command until it ends, or until `stdin` is closed. Return its exit code."""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as child:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda given, _: child.send_signal(given))
        ended = os.pidfd_open(child.pid)
        try:
            _until_closed(stdin, ended)
        finally:
            os.close(ended)
        return _stop(child)


def _until_closed(stdin: int, ended: int) -> None:
    while True:
        ready, _, _ = select.select([stdin, ended], [], [])
        if ended in ready or not os.read(stdin, 4096):
            return


def _stop(child: subprocess.Popen[bytes]) -> int:
    # The first SIGTERM asks the command to drain. The second one means: at once.
    for patience_s in (30.0, 15.0):
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            return child.wait(patience_s)
    child.kill()
    return child.wait()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
