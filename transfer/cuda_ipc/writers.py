"""Who copies by GPU right now: records beside the fence's header, for the proof after a death.

A copy by the CPU ends with the threads of its process, and the kernel frees their file locks only
after that. A GPU copies on by itself. When its writer is killed, the locks go when the files are
closed. The copies end when the driver destroys the CUDA context, which may be later. So a free lock
alone proves nothing about a writer that died.

    1024 + 16 * i     record i: u64 process (pid and when it started), u64 slot + 1 while it copies

A fence hold takes a record, and a lock on it for its life. It names its slot in the record while
copies may be in flight. The owner, once it has the slot's lock, looks for records that still name
the slot. Their writers lost the lock without finishing, so they are dying or dead. The owner takes
the end of the *process* as the proof. That is enough, by the driver's published source: the kernel
reports a process as ended (pidfd) after its last file was released, and the release of the driver's
control file frees the process's channels before it returns. A child forked without exec would keep
the files open; workers make none.

It is not enough in two cases, which `why_no_proof` finds. Under MPS, the channels are those of a
server that outlives its clients. And one setting makes the driver free channels some time later.
MIG changes nothing: an instance's channels are freed in the same way.
"""

from __future__ import annotations

import mmap
import os
import select
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pullfill.errors import PeerUnavailable, TransferFailed
from pullfill.transfer.gpu.cuda import CudaDriver
from pullfill.transfer.shm import lock

_AT = 1024
_RECORD_BYTES = 16
RECORDS = (4096 - _AT) // _RECORD_BYTES
"""How many GPU sessions one owner can have at a time."""
_PID_BITS = 22  # the kernel's limit of pid_max


def pid_namespace() -> str:
    """Names the space in which this process's pids count; empty if unknown."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def why_no_proof(driver: CudaDriver, device: int) -> str | None:
    """Why the end of this process would not prove the end of its copies on `device`, for people."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as exc:
        return f"this kernel does not tell for certain when a process has ended (pidfd_open: {exc})"
    try:
        shared, settings = driver.shares_contexts(device), driver.settings()
    except TransferFailed as exc:
        return f"whether the end of a process ends its copies is unknown: {exc}"
    if shared:
        return (
            "MPS runs here, and its server may copy on for a process that has ended: stop it (echo "
            "quit | nvidia-cuda-mps-control), or point CUDA_MPS_PIPE_DIRECTORY to an empty folder"
        )
    if "clientlistdeferredfree" in settings.lower():
        return (
            "the NVIDIA driver is set to free what dead processes held at some later time "
            "(RmClientListDeferredFree): remove that from the module's NVreg_RegistryDwords"
        )
    return None


def process_word(pid: int) -> int:
    """A process that never comes again: its pid and the kernel's time of its start. Raises
    OSError when there is none."""
    return _started(pid) << _PID_BITS | pid


def has_ended(word: int) -> bool:
    """Whether that process is gone for certain: all its threads have ended, all its files are
    released. Its parent may not have waited for it yet."""
    pid = word & (1 << _PID_BITS) - 1
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        if _is_readable(fd):
            return True  # and so has whoever had the number before
        return _started(pid) != word >> _PID_BITS  # somebody else has the number now
    except OSError:  # it ended just now, or /proc hides it from us (hidepid)
        return _is_readable(fd)
    finally:
        os.close(fd)


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _started(pid: int) -> int:
    """Clock ticks after boot. Raises ProcessLookupError, OSError."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError as exc:
        raise ProcessLookupError(f"no process {pid}") from exc
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


class WriterTable:
    """The owner's side; its `quiet` becomes `ShmFences.quiet`. Uses `fd` only to map the file."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, 4096)
        words = np.frombuffer(self._map, np.uint64, RECORDS * 2, _AT).reshape(RECORDS, 2)
        self._words: NDArray[np.uint64] | None = words

    def quiet(self, slot: int) -> bool:
        """Whether no GPU copies under the slot any more. The caller holds its exclusive lock. A
        record whose process has ended becomes free."""
        assert self._words is not None
        done = True
        for index in np.flatnonzero(self._words[:, 1] == slot + 1).tolist():
            if has_ended(int(self._words[index, 0])):
                self._words[index, 1] = 0
            else:
                done = False
        return done

    def close(self) -> None:
        """Idempotent."""
        if self._words is not None:
            self._words = None
            self._map.close()


class WriterRecord:
    """A writer's record. Its fence hold owns `fd`; the lock on `fd` keeps the record."""

    def __init__(self, fd: int) -> None:
        """Raises PeerUnavailable when all records are taken."""
        self._fd = fd
        self._map = mmap.mmap(fd, 4096)
        self._words = memoryview(self._map).cast("Q")
        for index in range(RECORDS):
            start = _AT + index * _RECORD_BYTES
            if not lock.try_exclusive(fd, start, _RECORD_BYTES):
                continue
            if not self._words[start // 8 + 1]:
                self._start = start
                self._words[start // 8] = process_word(os.getpid())
                return
            # The owner has not yet proved the end of who had it.
            lock.unlock(fd, start, _RECORD_BYTES)
        self._unmap()
        raise PeerUnavailable(f"{RECORDS} GPU sessions write to this decode worker already")

    def begin(self, slot: int) -> None:
        """Holding the slot, before anything is queued."""
        self._words[self._start // 8 + 1] = slot + 1

    def end(self) -> None:
        """Still holding it, after everything queued is done."""
        self._words[self._start // 8 + 1] = 0

    def close(self) -> None:
        """Free the record. Only after `end`."""
        lock.unlock(self._fd, self._start, _RECORD_BYTES)
        self._unmap()

    def _unmap(self) -> None:
        self._words.release()
        self._map.close()
