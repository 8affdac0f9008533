"""Notices that files have changed, by looking at them now and then.

A look also follows links that are swapped, as Kubernetes does for mounted secrets. It costs one
`stat` per file, on another thread, so a slow disk stops nobody.
"""

from __future__ import annotations

import asyncio
import os

# What changes with a file: its inode, size in bytes and time in ns. A text: it cannot be read.
Stamp = tuple[int, int, int] | str


class WatchedFiles:
    """These files, as they were last read. Belongs to one loop.

    every_s: how often they are looked at. Two looks must agree, so a change acts after twice that.
    """

    def __init__(self, *paths: str, every_s: float = 1.0) -> None:
        self._every_s = every_s
        self._paths = paths
        self._read = self._stamps()

    async def wait(self) -> None:
        """Return once the files differ from what was read last."""
        now = self._read
        while True:
            await asyncio.sleep(self._every_s)
            last, now = now, await asyncio.to_thread(self._stamps)
            # One that differs from look to look is still being written.
            if now == last and now != self._read:
                self._read = now
                return

    def _stamps(self) -> list[Stamp]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: str) -> Stamp:
    try:
        found = os.stat(path)
    except OSError as exc:
        return exc.strerror or type(exc).__name__
    return found.st_ino, found.st_size, found.st_mtime_ns
