"""Processes by identity: a pid with its kernel start time. A pid alone can be used again.

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
    """One process, also if its pid is used again later.

    started: clock ticks since boot, field 22 of /proc/PID/stat."""

    pid: int
    started: int


def _stat_fields(pid: int) -> list[bytes] | None:
    """Return the fields of /proc/PID/stat from the third on, the state. None: no such process."""
    try:
        raw = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return raw[raw.rindex(b")") + 2 :].split()


def start_time(pid: int) -> int | None:
    """Return the kernel's start time of `pid` in clock ticks since boot. None: it does not run."""
    # A zombie counts as ended: its parent may never reap it.
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
    """Send a signal to exactly this process. False: it is gone."""
    # The pid could be used again between the check and the signal. A pidfd rules that out.
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
    """Pin every thread of the process, and those it starts later, to these cores.

    A process that is gone, or another user's, stays as it is."""
    done: set[str] = set()
    with suppress(OSError):
        # A thread that was made during a pass may have missed it.
        while fresh := set(os.listdir(f"/proc/{pid}/task")) - done:
            for tid in fresh:
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(tid), cores)
            done |= fresh


def tagged(cluster_id: str) -> list[ProcessId]:
    """Return every running process that has this cluster's id in its environment."""
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
    """Return the last lines of a log file. Empty: there is no such file."""
    try:
        with log.open("rb") as handle:
            handle.seek(max(0, log.stat().st_size - 64 * 1024))
            text = handle.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]


async def wait_exit(child: subprocess.Popen[bytes]) -> int:
    """Wait for the end of the process and return its exit code."""
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
    """Return in words the exit code that subprocess gives."""
    if code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
