"""What machine this is, for transports within one host and for pids, and how many files a process
may open."""

from __future__ import annotations

import hashlib
import os
import resource
import socket
import sys
from functools import cache
from pathlib import Path

SHM_DIR_ENV = "PULLFILL_SHM_DIR"
# Enough for 32,000 KV connections. Not more: some programs loop over all allowed numbers.
_OPEN_FILES = 1 << 16


def shm_dir() -> Path:
    """Where shared KV files lie: $PULLFILL_SHM_DIR or /dev/shm."""
    return Path(os.environ.get(SHM_DIR_ENV) or "/dev/shm")


@cache
def host_id() -> str:
    """Equal for two processes that can share memory: boot id and device of `shm_dir`."""
    try:
        shm = shm_dir().stat().st_dev
    except OSError:
        shm = 0
    return hashlib.blake2b(f"{_boot()}/{shm}".encode(), digest_size=8).hexdigest()


@cache
def pid_space() -> str:
    """Where the pids that this process sees are valid: `HOST/BOOT/PID_NAMESPACE`."""
    return f"{socket.gethostname()}/{_boot()}/{pid_namespace()}"


def pid_namespace() -> str:
    """Return an id of this process's PID namespace. Empty if unknown."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_own_space(space: str) -> bool:
    """Whether pids of `space` are valid here.

    The name of the host is for people. It may change, and several hosts may have the same."""
    return space.partition("/")[2] == pid_space().partition("/")[2]


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def open_files() -> int:
    """How many descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def allow_open_files() -> None:
    """Raise this process's soft limit to the hard one, at most to 65536."""
    # Distributions start processes with 1024. A worker has a few connections for each worker of the
    # other kind.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
