"""Moving bytes between two addresses of this process with the GIL released.

Two ways. `memmove` per run is fastest while nobody else wants the GIL. Beside a busy Python thread
each run's return costs up to a whole switch interval (5 ms): short runs became 18 times slower. So
short runs are watched, and when the thread sleeps for milliseconds between them, batches go through
one vectored kernel copy (`process_vm_writev` to ourselves; ~25 % slower per byte, but the GIL is
given up once per batch) for a second before the plain way is tried again.
"""

from __future__ import annotations

import ctypes
import os
import resource
import time
from functools import cache

import numpy as np
from numpy.typing import NDArray

from pullfill.errors import TransferFailed
from pullfill.transfer.runs import Batch

_LONG_RUN = 256 << 10
_WATCH_EVERY = 8
_SLEEPS = 2
_LOST_S = 2e-3
"""A contended GIL: this many voluntary context switches (preemption by other processes is
involuntary) and this much wall time not spent computing, in `_WATCH_EVERY` runs."""
_VECTORED_FOR_S = 1.0

_libc = ctypes.CDLL(None, use_errno=True)
_memmove = _libc.memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = ctypes.c_void_p

_vectored_until = 0.0
"""Wall time (perf_counter) up to which the GIL counts as wanted by others. A hint: races on it
cost speed only."""


def copy_batch(source: int, target: int, batch: Batch) -> None:
    """Copy every run; offsets count from the addresses `source` and `target`. The caller has
    checked the ranges. Raises TransferFailed when the kernel copied less than all."""
    few_and_long = len(batch) < _WATCH_EVERY or batch.total >= _LONG_RUN * len(batch)
    done = 0
    if few_and_long or not vectored_works():
        _copy_runs(source, target, batch, 0, len(batch))
        return
    if time.perf_counter() >= _vectored_until:
        done = _copy_watched(source, target, batch)
    if done < len(batch):
        _copy_vectored(source, target, batch, done)


def corrupt(address: int) -> None:
    """For failpoints: change one byte of the four at `address`, the one that holds the exponent of
    a float32, so that whoever uses it computes something else."""
    ctypes.c_ubyte.from_address(address + 3).value ^= 0xFF


def _copy_runs(source: int, target: int, batch: Batch, first: int, last: int) -> None:
    for src, dst, nbytes in zip(
        batch.source[first:last].tolist(),
        batch.target[first:last].tolist(),
        batch.nbytes[first:last].tolist(),
        strict=True,
    ):
        _memmove(target + dst, source + src, nbytes)


def _copy_watched(source: int, target: int, batch: Batch) -> int:
    """Copy run by run until the GIL proves to be contended. Returns how many runs are done."""
    global _vectored_until
    slept, lost = _idle()
    for first in range(0, len(batch), _WATCH_EVERY):
        last = min(first + _WATCH_EVERY, len(batch))
        _copy_runs(source, target, batch, first, last)
        slept_before, lost_before = slept, lost
        slept, lost = _idle()
        if slept - slept_before >= _SLEEPS and lost - lost_before >= _LOST_S:
            _vectored_until = time.perf_counter() + _VECTORED_FOR_S
            return last
    return len(batch)


def _idle() -> tuple[int, float]:
    """How often this thread went to sleep, and wall less CPU seconds: both as running totals."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_nvcsw, time.perf_counter() - usage.ru_utime - usage.ru_stime


def _copy_vectored(source: int, target: int, batch: Batch, first: int) -> None:
    nbytes = batch.nbytes[first:]
    moved = _vectored(
        _iovec(source, batch.source[first:], nbytes), _iovec(target, batch.target[first:], nbytes)
    )
    if moved != int(nbytes.sum()):
        raise TransferFailed(
            f"moved {moved} of {int(nbytes.sum())} bytes: {os.strerror(ctypes.get_errno())}"
        )


@cache
def vectored_works() -> bool:
    """Whether this kernel and sandbox let a process copy within itself by iovec."""
    source, target = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    one = np.array([[0, 4], [4, 4]], np.uint64)
    src, dst = one.copy(), one.copy()
    src[:, 0] += np.uint64(source.ctypes.data)
    dst[:, 0] += np.uint64(target.ctypes.data)
    try:
        return _vectored(src, dst) == 8 and bool((source == target).all())
    except AttributeError:
        return False


def _iovec(base: int, offsets: NDArray[np.int64], nbytes: NDArray[np.int64]) -> NDArray[np.uint64]:
    iovec = np.empty((len(nbytes), 2), np.uint64)
    iovec[:, 0] = offsets
    iovec[:, 0] += np.uint64(base)
    iovec[:, 1] = nbytes
    return iovec


def _vectored(source: NDArray[np.uint64], target: NDArray[np.uint64]) -> int:
    call = _libc.process_vm_writev
    call.restype = ctypes.c_ssize_t
    return int(
        call(
            os.getpid(),
            ctypes.c_void_p(source.ctypes.data),
            ctypes.c_ulong(len(source)),
            ctypes.c_void_p(target.ctypes.data),
            ctypes.c_ulong(len(target)),
            ctypes.c_ulong(0),
        )
    )
