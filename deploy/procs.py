"""Processes by identity: a pid alone can be reused, a pid with its kernel start time cannot.

Nothing here signals a process whose start time is not the one that was recorded. Children are put
in their own session, so that Ctrl-C reaches only the supervisor, which then stops them in order.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

CLUSTER_ENV = "PULLFILL_CLUSTER_ID"
"""Set in every child of `pullfill up`: finds a child that was started but not yet recorded."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process for good. `started`: clock ticks since boot (field 22 of /proc/PID/stat)."""

    pid: int
    started: int


def _stat_fields(pid: int) -> list[bytes] | None:
    """Fields 3.. of /proc/PID/stat (state first), None if there is no such process."""
    try:
        raw = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return raw[raw.rindex(b")") + 2 :].split()


def start_time(pid: int) -> int | None:
    """Kernel start time of `pid` in clock ticks since boot; None if it does not run.

    A zombie does not run: whoever should reap it may never do so.
    """
    fields = _stat_fields(pid)
    if fields is None or fields[0] in (b"Z", b"X"):
        return None
    return int(fields[19])


def identify(pid: int) -> ProcessId | None:
    """The identity of a running process."""
    started = start_time(pid)
    return None if started is None else ProcessId(pid, started)


def is_alive(process: ProcessId) -> bool:
    """Whether exactly this process still runs (stopped counts as running)."""
    return start_time(process.pid) == process.started


def send(process: ProcessId, sig: int) -> bool:
    """Signal exactly this process; False if it is gone. The pidfd closes the gap between the
    check and the signal, in which the pid could be reused."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(fd, sig)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def spawn(
    argv: Sequence[str], *, log: Path, env: Mapping[str, str], cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start `argv` in its own session, stdin closed, stdout and stderr appended to `log`.

    Raises OSError when the program cannot be started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    handle: IO[bytes]
    with log.open("ab") as handle:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=handle,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
        )


def confine(pid: int, cores: Collection[int]) -> None:
    """Let every thread of the process, and each it starts from now on, run on these cores only. A
    process that is gone, or not ours, stays as it is."""
    done: set[str] = set()
    with suppress(OSError):
        # A thread that was made during a pass may have missed it.
        while fresh := set(os.listdir(f"/proc/{pid}/task")) - done:
            for tid in fresh:
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(tid), cores)
            done |= fresh


def tagged(cluster_id: str) -> list[ProcessId]:
    """Every running process that carries this cluster's id in its environment."""
    needle = f"{CLUSTER_ENV}={cluster_id}".encode()
    found: list[ProcessId] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environ = (entry / "environ").read_bytes()
        except OSError:
            continue
        if needle in environ.split(b"\0"):
            process = identify(int(entry.name))
            if process is not None:
                found.append(process)
    return found


def tail(log: Path, lines: int = 15) -> list[str]:
    """The last lines of a log file, [] if there is none."""
    try:
        with log.open("rb") as handle:
            handle.seek(max(0, log.stat().st_size - 64 * 1024))
            text = handle.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]


async def wait_exit(child: subprocess.Popen[bytes]) -> int:
    """The exit code, without polling: a pidfd turns readable when the process ends."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    try:
        fd = os.pidfd_open(child.pid)
    except ProcessLookupError:
        return child.wait()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    return child.wait()


def exit_words(code: int) -> str:
    """An exit code as subprocess gives it, for people."""
    if code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
