"""Who copies by GPU right now: records beside the fence's header, for the proof after a death.

    1024 + 16 * i     record i: u64 process (`process_word`), u64 slot + 1 while it copies

A fence hold takes a record, and a lock on the record for its life. It names its slot in the record
while copies may be in flight. The owner first takes the slot's lock. Then it looks for records that
still name the slot. Their writers lost the lock without finishing, so they are dying or dead. The
owner takes the end of the *process* as the proof.
"""

from __future__ import annotations

import mmap
import os
import select
from pathlib import Path

from pullfill.errors import PeerUnavailable, TransferFailed
from pullfill.transfer.gpu.cuda import CudaDriver
from pullfill.transfer.shm import lock

_AT = 1024
_RECORD_BYTES = 16
_END = 4096
# How many GPU sessions one owner can have at a time.
RECORDS = (_END - _AT) // _RECORD_BYTES


# A CPU's copy ends with the threads of its process, and the kernel frees their file locks only
# after that. A GPU copies on by itself. When its writer is killed, its locks go when its files are
# closed. Its copies end when the driver destroys the CUDA context, which may be later. So a free
# lock proves nothing about a GPU writer that died.
#
# The end of its process does, by the driver's published source: the kernel reports a process as
# ended after its last file was released, and the release of the driver's control file frees the
# process's channels before it returns. A child forked without exec would keep the files open.
# Workers make none. MIG changes nothing: an instance's channels are freed in the same way.


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
    if shared:  # the channels are those of a server that outlives its clients
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


def quiet(words: memoryview, slot: int) -> bool:
    """Whether no GPU copies under the slot any more. The caller, the owner, holds its exclusive
    lock. A record whose process has ended becomes free.

    words: the fence file, as u64."""
    slots = words[_AT // 8 + 1 : _END // 8 : 2]
    named = slots.tolist()
    if slot + 1 not in named:
        return True
    done = True
    for index in (i for i, one in enumerate(named) if one == slot + 1):
        if has_ended(words[_AT // 8 + 2 * index]):
            slots[index] = 0
        else:
            done = False
    return done


class WriterRecord:
    """A writer's record. The lock on `fd` keeps it. The fence hold owns `fd`."""

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
        """Call while holding the slot, before anything is queued."""
        self._words[self._start // 8 + 1] = slot + 1

    def end(self) -> None:
        """Call while holding the slot, after everything queued is done."""
        self._words[self._start // 8 + 1] = 0

    def close(self) -> None:
        """Free the record. Only after `end`."""
        lock.unlock(self._fd, self._start, _RECORD_BYTES)
        self._unmap()

    def _unmap(self) -> None:
        self._words.release()
        self._map.close()


_PID_BITS = 22  # the kernel's limit of pid_max


def process_word(pid: int) -> int:
    """A number that no other process ever has: its pid, and when it started. Raises OSError when
    there is no such process."""
    return _started(pid) << _PID_BITS | pid


def has_ended(word: int) -> bool:
    """Whether the process with this `process_word` has ended. False in any doubt."""
    pid = word & (1 << _PID_BITS) - 1
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        if readable(fd):
            return True  # and so has whoever had the number before
        return _started(pid) != word >> _PID_BITS  # somebody else has the number now
    except OSError:  # it ended just now, or /proc hides it from us (hidepid)
        return readable(fd)
    finally:
        os.close(fd)


def readable(pidfd: int) -> bool:
    """Whether all threads of its process have ended, and all its files are released. Its parent may
    not have waited for it yet."""
    asked = select.poll()
    asked.register(pidfd, select.POLLIN)
    return bool(asked.poll(0))


def _started(pid: int) -> int:
    """Clock ticks after boot. Raises ProcessLookupError, OSError."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError as exc:
        raise ProcessLookupError(f"no process {pid}") from exc
    return int(stat[stat.rindex(b")") + 2 :].split()[19])
