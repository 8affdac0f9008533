"""A disk of a few MiB that a test fills."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_BLOCK = bytes(1 << 16)


@contextmanager
def small_disk(directory: Path, mib: int) -> Iterator[Path]:
    """Mount a tmpfs on `directory`. Skips the test where that is not allowed."""
    directory.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted: {done.stderr.strip()}")
    try:
        yield directory
    finally:
        # --lazy: what a failed test left running may still have a log open.
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@contextmanager
def full(directory: Path) -> Iterator[None]:
    """Use up all room of the disk of `directory`."""
    ballast = directory / "ballast"
    fd = os.open(ballast, os.O_WRONLY | os.O_CREAT)
    try:
        for block in (_BLOCK, b"x"):
            try:
                while os.write(fd, block):
                    pass
            except OSError:
                continue
    finally:
        os.close(fd)
    try:
        yield
    finally:
        ballast.unlink()
