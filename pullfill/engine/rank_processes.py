"""Ties the processes of an engine's ranks to the main process: if one dies, all end.

With tensor or pipeline parallelism vLLM runs each rank in a process of its own. `bind_to_parent`
runs in each of them, `RankWatch` in the main process. With one rank there are no such processes,
and both do nothing.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pullfill.runtime import log

logger = log.get("engine.ranks")

_PR_SET_PDEATHSIG = 1


def bind_to_parent() -> None:
    """End this rank's process with the engine, and by no other signal than SIGKILL. Main thread.

    In any other process this does nothing.
    """
    # vLLM ends a rank by closing a pipe. A rank that waits for another one in native code never
    # notices that, but the kernel's signal reaches it. SIGTERM and SIGINT go to the whole process
    # group (a drain, Ctrl-C), and only the main process knows what must still be finished.
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        logger.warning("a rank may outlive its worker: %s", os.strerror(ctypes.get_errno()))
    if not parent.is_alive():
        os._exit(1)  # it went before the kernel knew that we care
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def sentinels_of(core: Any) -> dict[int, int]:
    """Rank by the descriptor that becomes readable when the rank's process ends."""
    workers: Sequence[Any] = getattr(core.model_executor, "workers", None) or ()
    return {handle.proc.sentinel: handle.rank for handle in workers}


class RankWatch:
    """Calls `on_death(text)` once, when a rank's process ends before `stop`.

    Owns a thread while there are ranks. vLLM notices as well, but up to ten seconds later.
    """

    def __init__(self, sentinels: dict[int, int], on_death: Callable[[str], None]) -> None:
        self._sentinels = sentinels
        self._on_death = on_death
        self._stopped = False
        self._wake, self._end = multiprocessing.Pipe(duplex=False)
        self._thread: threading.Thread | None = None
        if sentinels:
            self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Call it before the ranks are ended. Idempotent."""
        if not self._stopped:
            self._stopped = True
            self._end.close()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join()
            self._wake.close()

    def _run(self) -> None:
        ready = multiprocessing.connection.wait([self._wake, *self._sentinels])
        dead = [self._sentinels[s] for s in ready if isinstance(s, int)]
        if dead and not self._stopped:
            self._on_death(f"the process of rank {dead[0]} ended")
