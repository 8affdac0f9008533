"""Whether the process that owns mapped GPU memory still lives.

The end of a process ends its CUDA contexts and frees their memory. To use it afterwards through a
mapping is undefined (CUDA Driver API, cuIpcOpenMemHandle). So a peer looks before each batch. A
batch under way when the owner dies is not covered.
"""

from __future__ import annotations

import ctypes
import os
import select

from pullfill.errors import PeerUnavailable

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
        """A signal during the call counts as no."""
        found: int = _poll(ctypes.byref(self._asked), ctypes.c_ulong(1), 0)
        return found == 1

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
