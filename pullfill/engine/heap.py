"""The memory of an engine's process: what malloc holds between its blocks goes back to the kernel,
twice a minute of work, and the garbage collector does not walk through long prompts."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from pullfill.clock import SYSTEM_CLOCK, Clock

EVERY_S = 30.0


def trim() -> None:
    """glibc's `malloc_trim`: the free pages of all arenas, holes included. Takes milliseconds and
    does not hold the GIL; without glibc it does nothing."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(ctypes.c_size_t(0))


def untrack(plain: list[Any]) -> None:
    """Take a list out of the garbage collector's sight. For long lists of what holds no references
    (integers, bytes): the collector visits each element while every thread waits, and such a list
    is part of no cycle. It is freed by its reference count as before."""
    ctypes.pythonapi.PyObject_GC_UnTrack(ctypes.py_object(plain))


class Heap:
    """Of a process whose engine makes and drops kernels and activations of ever other sizes: the
    holes between them are as many as ever were needed, and which ones were is chance. So memory in
    use looked like a leak that never ended. Who is idle does not grow, and is left alone.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK, trim: Callable[[], None] = trim) -> None:
        self._clock = clock
        self._trim = trim
        self._due = clock.monotonic() + EVERY_S

    def after_step(self) -> None:
        """Trim if it is time. Engine thread, between steps: for as long as a decode step, twice a
        minute."""
        if self._clock.monotonic() >= self._due:
            self._trim()
            self._due = self._clock.monotonic() + EVERY_S
