"""Programs of tests that run like `python -c CODE`, in processes forked from this one.

A new interpreter takes up to a second of CPU for its imports. A forked process has the modules that
are loaded here. As in a new interpreter, signals have their defaults, and the end of the program
waits for its threads.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from typing import Self

_fork = multiprocessing.get_context("fork")


def _run(code: str, arguments: tuple[str, ...], out: int, err: int) -> None:
    """In the new process."""
    for number, handler in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGPIPE, signal.SIG_IGN)):
        signal.signal(number, handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for source, target in ((out, 1), (err, 2)):
        os.dup2(source, target)
        os.close(source)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", 1)
    sys.argv[:] = ["-c", *arguments]
    exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})


class Program:
    """A program that runs. Leaving the context kills it.

    stdout, stderr: what it prints. It may print 64 KiB before the test reads."""

    def __init__(self, code: str, *arguments: str) -> None:
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        self._process = _fork.Process(target=_run, args=(code, arguments, out_end, err_end))
        self._process.start()
        os.close(out_end)
        os.close(err_end)
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)

    def wait(self, timeout_s: float) -> int:
        """Return the exit code, -N after signal N. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("program", timeout_s)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.closing(self._process), self.stdout, self.stderr:
            self._process.kill()
            self._process.join()


def run(code: str, *arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a program until it has ended and its pipes are closed."""
    with Program(code, *arguments) as program:
        said, complained = program.stdout.read(), program.stderr.read()
        return subprocess.CompletedProcess(code, program.wait(timeout_s), said, complained)
