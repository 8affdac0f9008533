"""Keeps the memory of an engine's process small, and its garbage collections short.

`Heap` gives malloc's free pages back to the kernel, twice a minute while the engine works.
`untrack` keeps the garbage collector away from long prompts. `begin_imports` and `end_imports` keep
it away from vLLM's modules, which saves a fifth of the CPU time of a start (`make bench-cluster`).
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pullfill.clock import SYSTEM_CLOCK, Clock

EVERY_S = 30.0


def trim() -> None:
    """Give the free pages of all malloc arenas back to the kernel (glibc's `malloc_trim`).

    Takes milliseconds and does not hold the GIL. Without glibc it does nothing."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(ctypes.c_size_t(0))


def begin_imports() -> None:
    """Turn garbage collection off. `end_imports` must follow."""
    gc.disable()


def end_imports() -> None:
    """Collect garbage once, exclude all that is left from collections, and turn them on again.

    vLLM collects several times while it builds an engine, and each time would visit every object of
    every module. Does nothing if collection is on. Takes half a second of CPU."""
    if not gc.isenabled():
        gc.collect()
        gc.freeze()
        gc.enable()


@contextmanager
def no_collections() -> Iterator[None]:
    """Let `gc.collect` do nothing meanwhile, in the whole process.

    vLLM calls it several times while it shuts an engine down. Each call visits every object of
    every module. That is most of the CPU time of a worker's end, and frees nothing that the end of
    the process does not free."""
    collect = gc.collect
    gc.collect = lambda generation=2: 0
    try:
        yield
    finally:
        gc.collect = collect


def untrack(plain: list[Any]) -> None:
    """Exclude a list from garbage collection. Its reference count still frees it.

    The collector visits each element of a list, and all threads wait meanwhile.

    plain: a long list whose elements hold no references (integers, bytes). Such a list cannot be
    part of a reference cycle."""
    ctypes.pythonapi.PyObject_GC_UnTrack(ctypes.py_object(plain))


class Heap:
    """Trims the heap of an engine's process.

    The engine allocates and frees kernels and activations of many sizes. The free holes between
    them add up, and malloc keeps them, so the process grows as if it had a leak. An idle process
    does not grow, so it is not trimmed.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK, trim: Callable[[], None] = trim) -> None:
        self._clock = clock
        self._trim = trim
        self._due = clock.monotonic() + EVERY_S

    def after_step(self) -> None:
        """Trim if EVERY_S have passed since the last time. Takes about as long as a decode step.

        Call it on the engine thread, between steps."""
        if self._clock.monotonic() >= self._due:
            self._trim()
            self._due = self._clock.monotonic() + EVERY_S
