"""Keeps a cluster of `up` going when the disk of its state directory is full.

Who writes there, and what a full disk does to it:

    etcd         ends with a fatal error. Workers keep their leases and serve. The keeper starts
                 etcd again when there is room, and counts no such death (keeper.py)
    NATS         stores no job, and goes on storing none after there is room. Decode workers
                 prefill all prompts themselves. `DiskWatch` starts NATS again when there is room
    cluster.json stays as it was (children.py). `DiskWatch` has it written when there is room
    logs         lose lines. No process ends for that

Linux tells nobody that a disk is full, so `DiskWatch` looks every LOOK_S seconds. Its line comes
while there is still room for the line.
"""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

from pullfill.deploy.children import Children

LOW = 16 << 20
"""Bytes. The disk counts as full when less than this is free, until twice as much is."""
LOOK_S = 5.0
_COMPLAINT = os.strerror(errno.ENOSPC).lower().encode()
_MOST = 1 << 20


def free(path: Path) -> int:
    """Return how many bytes a user may still write there. Raises OSError."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def is_full(path: Path, least: int = LOW) -> bool:
    """Whether fewer than `least` bytes are free. False: that cannot be told."""
    try:
        return free(path) < least
    except OSError:
        return False


def in_words(path: Path) -> str | None:
    """Return a line about a full disk. None: it has room, or there is no such directory."""
    try:
        room = free(path)
    except OSError:
        return None
    if room >= LOW:
        return None
    return (
        f"the disk of {path} is full ({room >> 20} MiB free): serving goes on, but NATS "
        "stores no jobs, etcd may end, and logs lose lines. Free some space"
    )


class DiskWatch:
    """Looks at the disk of the state directory. One task runs `watch`.

    restart: whether the keeper starts processes again."""

    def __init__(self, children: Children, *, restart: bool) -> None:
        self._children = children
        self._restart = restart
        self._path = children.state.path
        self._was_full = False
        self._nats_failed = False
        self._read = 0

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Say when the disk has become full, and mend what that broke when it has room again."""
        say = self._children.view.say
        self._nats_failed |= self._nats_complains() or self._was_full
        if not self._was_full and (line := in_words(self._path)):
            self._was_full = True
            say(line, "bold red")
        if is_full(self._path, 2 * LOW):
            return
        if self._was_full:
            self._was_full = False
            say(f"the disk of {self._path} has room again")
            self._children.record()
        if self._nats_failed:
            self._nats_failed = False
            if self._restart and "nats" in self._children.names:
                say("nats starts again: it met a full disk, and stores nothing since then")
                self._children["nats"].terminate()

    def _nats_complains(self) -> bool:
        """Whether the log tells of a full disk since the last look. It may have been full for a
        moment only."""
        log = self._children.state.log_of("nats")
        try:
            if (size := log.stat().st_size) <= self._read:
                return False
            with log.open("rb") as file:
                file.seek(self._read)
                self._read = size
                return _COMPLAINT in file.read(_MOST)
        except OSError:
            return False
