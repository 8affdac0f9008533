"""What machine this is: identity for same-host transports and the address others reach us at."""

from __future__ import annotations

import hashlib
import os
import socket
from functools import cache
from pathlib import Path

SHM_DIR_ENV = "PULLFILL_SHM_DIR"


def shm_dir() -> Path:
    """Where shared KV files lie: $PULLFILL_SHM_DIR or /dev/shm."""
    return Path(os.environ.get(SHM_DIR_ENV) or "/dev/shm")


@cache
def host_id() -> str:
    """Same for two processes that can share memory: boot id + the identity of `shm_dir`."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()
    try:
        shm = shm_dir().stat().st_dev
    except OSError:
        shm = 0
    return hashlib.blake2b(f"{boot}/{shm}".encode(), digest_size=8).hexdigest()
