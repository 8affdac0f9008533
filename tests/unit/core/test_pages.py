"""Pages of a shared file come when they are asked for, and keep what is in them."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile

from pullfill.runtime import pages

MIB = 1 << 20


def test_all_of_it_and_nothing_is_changed() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(9 * MIB)
        memory = mmap.mmap(file.fileno(), 9 * MIB)
        memory[5 * MIB : 5 * MIB + 3] = b"abc"
        assert os.stat(file.name).st_blocks * 512 == mmap.PAGESIZE
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert pages.make_present(address, 9 * MIB, parts=3) == 9 * MIB
        assert os.stat(file.name).st_blocks * 512 == 9 * MIB
        assert memory[5 * MIB : 5 * MIB + 4] == b"abc\0"
