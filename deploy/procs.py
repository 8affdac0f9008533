"""Starts, finds and signals processes.

A process is known by its pid and its start time, since a pid can be used again, and by the boot and
the pid namespace in which the pid is valid: records may lie on a disk that several hosts share.
Children get a session of their own, so that Ctrl-C reaches only the supervisor, which stops them in
order.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pullfill.net.this_host import is_own_space, pid_space

CLUSTER_ENV = "PULLFILL_CLUSTER_ID"
"""Set in every child of `pullfill up`, to find those that are not recorded."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process, also if its pid is used again later.

    started: clock ticks since boot, field 22 of /proc/PID/stat.
    space: as of `this_host.pid_space`."""

    pid: int
    started: int
    space: str = field(default_factory=pid_space)


def start_time(pid: int) -> int | None:
    """Return the kernel's start time of `pid` in clock ticks since boot. None: it does not run."""
    try:
        raw = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, *fields = raw[raw.rindex(b")") + 2 :].split()  # the name before it may have any letters
    # A zombie counts as ended: its parent may never reap it.
    return None if state in (b"Z", b"X") else int(fields[18])


def identify(pid: int) -> ProcessId | None:
    """Return the identity of a process. None: it does not run."""
    started = start_time(pid)
    return None if started is None else ProcessId(pid, started)


def is_alive(process: ProcessId) -> bool:
    """Whether exactly this process still runs. A stopped process runs.

    False for one of another host, boot or pid namespace: see `StateDir.refuse_foreign`."""
    return is_own_space(process.space) and start_time(process.pid) == process.started


def send(process: ProcessId, sig: int) -> bool:
    """Send a signal to exactly this process. False: it is gone."""
    # The pid could be used again between the check and the signal. A pidfd rules that out.
    with suppress(OSError):
        fd = os.pidfd_open(process.pid)
        try:
            if is_alive(process):
                signal.pidfd_send_signal(fd, sig)
                return True
        finally:
            os.close(fd)
    return False


def spawn(argv: Sequence[str], *, log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a program. What it prints is appended to `log`. Raises OSError if it cannot start."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as handle:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=handle,
            stderr=subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,
        )


def confine(pid: int, cores: Collection[int]) -> None:
    """Pin every thread of the process, and those it starts later, to these cores."""
    done: set[str] = set()
    with suppress(OSError):
        # A thread that was made during a pass may have missed it.
        while fresh := set(os.listdir(f"/proc/{pid}/task")) - done:
            for tid in fresh:
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(tid), cores)
            done |= fresh


def tagged(cluster_id: str) -> list[ProcessId]:
    """Return every other running process that has this cluster's id in its environment."""
    needle = f"{CLUSTER_ENV}={cluster_id}".encode()
    found: list[ProcessId] = []
    for entry in Path("/proc").glob("[0-9]*"):
        # Not psutil: it stops at an empty entry, which a process that renames itself may have.
        with suppress(OSError):
            ours = needle in (entry / "environ").read_bytes().split(b"\0")
            if ours and entry.name != str(os.getpid()) and (process := identify(int(entry.name))):
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
