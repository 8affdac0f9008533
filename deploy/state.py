"""The state directory of a local cluster, and the processes that are recorded there.

    cluster.json    addresses, processes, and how `up` started it: a worker started by hand gets the
                    same model and flags
    lock            held while `up` or `down` works
    stopping        is there while `down` stops the processes
    ID.leaving      this worker or frontend was told to leave, or has left by itself
    logs/           of every process
    etcd/, nats/    data of the servers

Only the holder of the lock writes. Files are replaced at once, so nobody reads half of one.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import subprocess
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote

import msgspec

from pullfill.config import (
    CLUSTER_FILE,
    DEFAULT_STATE_DIR,
    STATE_DIR_ENV,
    ClusterFile,
    NoCluster,
    ProcessEntry,
    ProcessId,
    read_cluster_file,
)
from pullfill.errors import ConfigError, NotNow
from pullfill.net.this_host import is_own_space

# --------------------------------------------------------------------------- processes

# Set in every child of `pullfill up`, to find those that are not recorded.
CLUSTER_ENV = "PULLFILL_CLUSTER_ID"


def start_time(pid: int) -> int | None:
    """Return the kernel's start time of `pid` in clock ticks since boot. None: it does not run."""
    try:
        raw = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, *fields = raw[raw.rindex(b")") + 2 :].split()  # the name before it may have any letters
    # A zombie counts as ended: its parent may never reap it.
    return None if state in (b"Z", b"X") else int(fields[18])


def identify(pid: int) -> ProcessId | None:
    """Return the identity of a process. None: it does not run."""
    started = start_time(pid)
    return None if started is None else ProcessId(pid, started)


def is_alive(process: ProcessId) -> bool:
    """Whether exactly this process still runs. A stopped process runs.

    False for one of another host, boot or pid namespace: see `StateDir.refuse_foreign`."""
    return is_own_space(process.space) and start_time(process.pid) == process.started


def send(process: ProcessId, sig: int) -> bool:
    """Send a signal to exactly this process. False: it is gone."""
    # The pid could be used again between the check and the signal. A pidfd rules that out.
    with suppress(OSError):
        fd = os.pidfd_open(process.pid)
        try:
            if is_alive(process):
                signal.pidfd_send_signal(fd, sig)
                return True
        finally:
            os.close(fd)
    return False


def confine(pid: int, cores: Collection[int]) -> None:
    """Pin every thread of the process, and those it starts later, to these cores."""
    done: set[str] = set()
    with suppress(OSError):
        # A thread that was made during a pass may have missed it.
        while fresh := set(os.listdir(f"/proc/{pid}/task")) - done:
            for tid in fresh:
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(tid), cores)
            done |= fresh


def tagged(cluster_id: str) -> list[ProcessId]:
    """Return every other running process that has this cluster's id in its environment."""
    needle = f"{CLUSTER_ENV}={cluster_id}".encode()
    found: list[ProcessId] = []
    for entry in Path("/proc").glob("[0-9]*"):
        # Not psutil: it stops at an empty entry, which a process that renames itself may have.
        with suppress(OSError):
            ours = needle in (entry / "environ").read_bytes().split(b"\0")
            if ours and entry.name != str(os.getpid()) and (process := identify(int(entry.name))):
                found.append(process)
    return found


def tail(log: Path, lines: int = 15) -> list[str]:
    """Return the last lines of a log file. Empty: there is no such file."""
    try:
        with log.open("rb") as handle:
            handle.seek(max(0, log.stat().st_size - 64 * 1024))
            text = handle.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]


async def wait_exit(child: subprocess.Popen[bytes]) -> int:
    """Wait for the end of the process and return its exit code."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    try:
        fd = os.pidfd_open(child.pid)
    except ProcessLookupError:
        return child.wait()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    return child.wait()


def exit_words(code: int) -> str:
    """Return in words the exit code that subprocess gives."""
    if code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


# --------------------------------------------------------------------------- the directory

STOPPING_FILE = "stopping"


class Locked(NotNow):
    """Another `up` or `down` works on the directory now."""


class StateDir:
    """One state directory. `locked` creates it."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(path or os.environ.get(STATE_DIR_ENV) or DEFAULT_STATE_DIR).absolute()

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log_of(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def leaving_of(self, instance_id: str) -> Path:
        return self.path / f"{instance_id}.leaving"

    def leaves(self, entry: ProcessEntry) -> bool:
        """Return whether the process was told to leave: by `pullfill drain`, or by a signal."""
        return entry.instance_id is not None and self.leaving_of(entry.instance_id).exists()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the directory.

        Raises Locked at once if another `up` or `down` holds it, ConfigError if the directory
        cannot be written to."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise ConfigError(
                f"cannot write to {self.path} ({exc.strerror}): choose another --state-dir, or run "
                "as its owner"
            ) from exc
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Locked(
                    f"another `pullfill up` or `pullfill down` is working on {self.path}: "
                    "wait for it, or choose another --state-dir"
                ) from None
            except OSError as exc:
                raise ConfigError(
                    f"cannot lock {self.path} ({exc.strerror}): choose a --state-dir on a disk of "
                    "this machine"
                ) from exc
            yield
        finally:
            os.close(fd)

    def cluster(self) -> ClusterFile | None:
        """Return the content of cluster.json, or None if there is none.

        Raises ConfigError if it cannot be read or is damaged."""
        try:
            return read_cluster_file(self.path)
        except NoCluster:
            return None

    def write_cluster(self, cluster: ClusterFile) -> None:
        path = self.path / CLUSTER_FILE
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        # Flags for vLLM may hold a key (--api-key): for this user only.
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(cluster)) + b"\n")
            temporary.replace(path)
        except OSError:  # e.g. a full disk
            temporary.unlink(missing_ok=True)
            raise

    def readable(self) -> ClusterFile | None:
        """Return the content of cluster.json. None: there is none, or it cannot be read."""
        with suppress(ConfigError):
            return self.cluster()
        return None

    def live(self) -> list[ProcessEntry]:
        """Return the recorded processes that still run."""
        cluster = self.cluster()
        return [e for e in cluster.processes if is_alive(e)] if cluster else []

    def refuse_foreign(self) -> None:
        """Raise ConfigError if the record is of another host, boot or container."""
        # Its pids are not valid here, so nobody can tell what still runs.
        cluster = self.readable()
        for process in [cluster.supervisor, *cluster.processes] if cluster else []:
            if not is_own_space(process.space):
                raise ConfigError(
                    f"the cluster of {self.path} was started on host "
                    f"{process.space.partition('/')[0]}, "
                    "which is another one, or another container, or was restarted since: run this "
                    f"command there. If nothing of it runs any more, delete {CLUSTER_FILE} in that "
                    "directory"
                )

    def refuse_if_live(self) -> None:
        """Raise ConfigError, which names the pids, if a cluster runs here, or as `refuse_foreign`
        does."""
        self.refuse_foreign()
        running = [f"{entry.name} (pid {entry.pid})" for entry in self.live()]
        cluster = self.cluster()
        if not running and cluster and is_alive(cluster.supervisor):
            running = [f"its supervisor (pid {cluster.supervisor.pid})"]
        if running:
            where = quote(str(self.path))
            raise ConfigError(
                f"a cluster already runs from {self.path}: {', '.join(running)}. Stop it with "
                f"`pullfill down --state-dir {where}`, or choose another --state-dir"
            )

    def prepare(self) -> None:
        """Remove the data of NATS and etcd, and keep old logs as NAME.log.1."""
        # Old data names ports and instances that are gone.
        for name in ("etcd", "nats"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        self.logs.mkdir(parents=True, exist_ok=True)
        for log in self.logs.glob("*.log"):
            log.replace(log.with_suffix(".log.1"))
        for mark in self.path.glob("*.leaving"):
            mark.unlink()
        self.clear()

    def mark_stopping(self) -> None:
        """Tell the `up` that supervises the processes that `pullfill down` ends them."""
        with suppress(OSError):
            (self.path / STOPPING_FILE).touch()

    def stopping(self) -> bool:
        return (self.path / STOPPING_FILE).exists()

    def clear(self) -> None:
        """Remove the records of the cluster. Logs stay."""
        for name in (CLUSTER_FILE, STOPPING_FILE):
            (self.path / name).unlink(missing_ok=True)


# --------------------------------------------------------------------------- its disk

# Bytes. The disk counts as full when less than this is free, until twice as much is.
LOW_DISK = 16 << 20


def full_disk(path: Path, least: int = LOW_DISK) -> str | None:
    """Return a line about a disk with fewer than `least` bytes free. None: it has more, or nobody
    can tell."""
    with suppress(OSError):
        if (room := shutil.disk_usage(path).free) < least:
            return (
                f"the disk of {path} is full ({room >> 20} MiB free): serving goes on, but NATS "
                "stores no jobs, etcd may end, and logs lose lines. Free some space"
            )
    return None
