"""`up --detach`: the command returns, and the supervisor goes on in the background.

The command forks before it starts anything. The child becomes the supervisor, in a session of its
own. It writes to the terminal until the cluster is ready. Until then the parent waits and passes
signals to it. The parent's exit code tells whether the cluster has started.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

from pullfill.deploy.procs import exit_words
from pullfill.errors import UnavailableError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Background:
    """The child's side."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def ready(self, log: Path) -> None:
        """Let the parent return. Output goes to `log` from now on."""
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError:  # a full disk must not end the cluster
            fd = os.open(os.devnull, os.O_WRONLY)
        for standard in (1, 2):
            os.dup2(fd, standard)
        os.close(fd)
        with suppress(BrokenPipeError):  # the parent was killed
            os.write(self._pipe, b"1")
        os.close(self._pipe)


def to_background() -> Background | int:
    """Fork. No other thread may run in this process.

    In the child, return a Background. In the parent, wait until the child is ready or has ended,
    and return the command's exit code. Raises UnavailableError there if the child was killed.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        stdin = os.open(os.devnull, os.O_RDONLY)
        os.dup2(stdin, 0)
        # Close what the caller had open, such as a lock or a pipe. The cluster must not keep it.
        os.closerange(3, writing)
        os.closerange(writing + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        return Background(writing)
    os.close(writing)

    def forward(number: int, _: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)

    for number in _SIGNALS:
        signal.signal(number, forward)
    if os.read(reading, 1):
        return 0
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        raise UnavailableError(f"the start was {exit_words(code)}: clean up with `pullfill down`")
    return code
