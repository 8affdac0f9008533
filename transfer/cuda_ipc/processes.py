"""Whether another process of this host has ended for certain.

A pidfd is readable when all threads of its process have ended and all its files are released. Its
parent may not have waited for it yet.
"""

from __future__ import annotations

import ctypes
import os
import select
from pathlib import Path

from pullfill.errors import PeerUnavailable

_PID_BITS = 22  # the kernel's limit of pid_max

# Keeps the GIL, as in shm/lock.py: the call never blocks.
_poll = ctypes.PyDLL(None).poll


class _PollFd(ctypes.Structure):
    """struct pollfd."""

    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class Process:
    """Another process of this host."""

    def __init__(self, pid: int) -> None:
        """Raises PeerUnavailable when there is none."""
        try:
            self._fd = os.pidfd_open(pid)
        except OSError as exc:
            raise PeerUnavailable(f"process {pid}, which owns the GPU memory: {exc}") from exc
        self._asked = _PollFd(self._fd, select.POLLIN, 0)

    @property
    def ended(self) -> bool:
        return _readable(self._asked)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def process_word(pid: int) -> int:
    """A number that no other process ever has: its pid, and when it started. Raises OSError when
    there is no such process."""
    return _started(pid) << _PID_BITS | pid


def has_ended(word: int) -> bool:
    """Whether the process with this `process_word` has ended. False in any doubt."""
    pid = word & (1 << _PID_BITS) - 1
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    asked = _PollFd(fd, select.POLLIN, 0)
    try:
        if _readable(asked):
            return True  # and so has whoever had the number before
        return _started(pid) != word >> _PID_BITS  # somebody else has the number now
    except OSError:  # it ended just now, or /proc hides it from us (hidepid)
        return _readable(asked)
    finally:
        os.close(fd)


def pid_namespace() -> str:
    """Return an id of this process's PID namespace. Empty if unknown."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _readable(asked: _PollFd) -> bool:
    """A signal during the call counts as no."""
    found: int = _poll(ctypes.byref(asked), ctypes.c_ulong(1), 0)
    return found == 1


def _started(pid: int) -> int:
    """Clock ticks after boot. Raises ProcessLookupError, OSError."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError as exc:
        raise ProcessLookupError(f"no process {pid}") from exc
    return int(stat[stat.rindex(b")") + 2 :].split()[19])
