"""Pages of a shared file come when they are asked for, and keep what is in them."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

import pytest

from pullfill.runtime import pages

PAGE = mmap.PAGESIZE
MIB = 1 << 20

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="madvise of Linux")


class Shared:
    """A sparse file mapped whole."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        with path.open("wb") as file:
            file.truncate(nbytes)
        with path.open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    @property
    def there(self) -> int:
        """Bytes that have memory."""
        return os.stat(self._path).st_blocks * 512


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no tmpfs")
    return Path("/dev/shm")


def test_all_of_it_and_nothing_is_changed(directory: Path) -> None:
    path = directory / f"pages-{os.getpid()}"
    try:
        shared = Shared(path, 9 * MIB)
        shared.map[5 * MIB : 5 * MIB + 3] = b"abc"
        assert shared.there == PAGE
        assert pages.make_present(shared.address, 9 * MIB, parts=3) == 9 * MIB
        assert shared.there == 9 * MIB
        assert shared.map[5 * MIB : 5 * MIB + 4] == b"abc\0"
    finally:
        path.unlink()
