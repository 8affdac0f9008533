"""How fast this machine copies from one shared memory to another: the floor of a KV handoff."""

from __future__ import annotations

import ctypes
import mmap
import tempfile
import time
from pathlib import Path

SHM = Path("/dev/shm")


def copy_rate(nbytes: int, repeats: int = 15) -> float:
    """Bytes per second of one `memmove` over two files in /dev/shm, all pages touched before; the
    fastest. One thread, one run from end to end: nothing that moves blocks is faster."""
    folder = SHM if SHM.is_dir() else None
    with tempfile.TemporaryFile(dir=folder) as one, tempfile.TemporaryFile(dir=folder) as two:
        one.truncate(nbytes)
        two.truncate(nbytes)
        with mmap.mmap(one.fileno(), nbytes) as source, mmap.mmap(two.fileno(), nbytes) as target:
            source.write(b"\1" * nbytes)
            target.write(b"\2" * nbytes)
            return nbytes / min(_copy(source, target, nbytes) for _ in range(repeats))


def _copy(source: mmap.mmap, target: mmap.mmap, nbytes: int) -> float:
    from_, to = (ctypes.c_char.from_buffer(memory) for memory in (source, target))
    try:
        begin = time.perf_counter()
        ctypes.memmove(ctypes.addressof(to), ctypes.addressof(from_), nbytes)
        return time.perf_counter() - begin
    finally:
        del from_, to
