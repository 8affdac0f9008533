"""One NIXL agent over one memory. No other file calls NIXL. One thread at a time uses an agent.

The proof that nothing lands any more after a fault is `Agent.close`.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import secrets
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from pullfill.errors import ConfigError, TransferFailed
from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.gpu import cuda
from pullfill.transfer.runs import Iovec

log = logging.getLogger(__name__)

# Agents are made one at a time: what is put back afterwards belongs to process or thread.
_making = threading.Lock()
_FAST_S, _SHORT_S, _LONG_S = 0.1, 50e-6, 500e-6


@cache
def why_not() -> str | None:
    """Why NIXL cannot be used in this process. Imports it the first time."""
    if _package() is None:
        return "the nixl package is not installed (make install-nixl)"
    try:
        _import()
    except Exception as exc:
        return f"nixl cannot be imported: {exc}"
    return None


def version() -> str:
    """Of the installed package."""
    return importlib.metadata.version("nixl")


def _package() -> str | None:
    """The package with NIXL's classes. None: it is not installed."""
    # `nixl` only chooses between builds. It imports torch to do so, which takes seconds.
    if importlib.util.find_spec("nixl") is None:
        return None
    builds = [name for name in ("nixl_cu12", "nixl_cu13") if importlib.util.find_spec(name)]
    return builds[0] if len(builds) == 1 else "nixl"


@cache
def _import() -> Any:
    # Its import sets up logging of its own. NIXL_LOG_LEVEL still sets the level.
    before = logging.raiseExceptions
    try:
        api = importlib.import_module(f"{_package()}._api")
    finally:
        logging.raiseExceptions = before
    theirs = logging.getLogger("nixl")
    theirs.handlers.clear()  # it printed on stdout
    theirs.propagate = True
    if not os.environ.get("NIXL_LOG_LEVEL"):
        theirs.setLevel(logging.WARNING)
    return api


def pause(began: float) -> None:
    """Sleep once in a loop that polls: for a short time at first, later for longer.

    began: when the wait began, by `time.monotonic`.

    UCX moves bytes only when it is called. So pauses stay short for as long as most batches take.
    """
    time.sleep(_SHORT_S if time.monotonic() < began + _FAST_S else _LONG_S)


class Agent:
    """Owns NIXL's agent and the registration of the memory. `close` gives both back."""

    def __init__(self, memory: LocalMemory) -> None:
        """Raises TransferFailed."""
        self._gpu = memory.device
        self._kind = "DRAM" if memory.device is None else "VRAM"
        self._device = memory.device or 0
        self._remote: str | None = None
        with _failures("cannot make a NIXL agent"), _making, _same_affinity():
            self._enter()
            api = _import()
            # NIXL's progress thread would keep a core busy: who waits for a transfer polls.
            config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent: Any = api.nixl_agent(f"pullfill-{secrets.token_hex(8)}", config)
            if "UCX" not in self._agent.backends:
                raise TransferFailed("this NIXL has no UCX backend")
            region = (memory.address, memory.nbytes, self._device, "")
            self._registered: Any = self._agent.register_memory([region], self._kind)
            self.metadata: bytes = self._agent.get_agent_metadata()

    def connect(self, metadata: bytes) -> None:
        """Tell NIXL about the agent at the other end. Once. Raises TransferFailed."""
        with _failures("the peer's NIXL metadata cannot be used"):
            name = self._agent.add_remote_agent(metadata)
            self._remote = name.decode() if isinstance(name, bytes) else str(name)

    def move(
        self,
        verb: str,
        ours: Iovec,
        theirs: Iovec,
        their_device: int,
        check: Callable[[], None],
    ) -> None:
        """READ theirs into ours, or WRITE ours into theirs. Returns when all bytes are there.

        ours, theirs: runs of pairwise equal length.
        check: called during the wait; raises to give up.

        After any error, close the agent before its memory counts as quiet."""
        with _failures("the transfer failed"):
            self._enter()
            here = self._agent.get_xfer_descs(_rows(ours, self._device), self._kind)
            kind = "DRAM" if their_device < 0 else "VRAM"
            there = self._agent.get_xfer_descs(_rows(theirs, max(their_device, 0)), kind)
            handle = self._agent.initialize_xfer(verb, here, there, self._remote)
            try:
                state, began = self._agent.transfer(handle), time.monotonic()
                while state == "PROC":
                    check()
                    pause(began)
                    state = self._agent.check_xfer_state(handle)
            finally:
                del handle  # releases it, also while an error holds on to this frame
            if state != "DONE":
                raise TransferFailed("NIXL reports an error")

    def progress(self) -> None:
        """Let the other side's transfers advance. Raises TransferFailed."""
        with _failures("NIXL makes no progress"):
            self._enter()
            self._agent.get_new_notifs()

    def close(self) -> None:
        """Disconnect, deregister, destroy. When it returns, this agent moves nothing any more.
        After an error of the GPU it never returns, because nobody can know. Idempotent."""
        # A transfer that was given up may still be in a queue of UCX or of the network card, and to
        # release its handle does not promise to take it out. So the whole agent goes: its worker,
        # its endpoints, its registration. Without those, neither UCX nor a card can write there.
        agent, self._agent = self._agent, None
        registered, self._registered = self._registered, None
        if agent is None:
            return
        core = weakref.ref(agent.agent)
        with _making:
            _undo(agent, self._remote, registered)
            del agent, registered
        if core() is not None:
            log.error("a NIXL agent is still in use: its memory cannot be given back yet")
        while core() is not None:
            gc.collect()
            time.sleep(_LONG_S)
        if (gpu := self._gpu) is not None:
            # UCX may have queued copies that go on without it: wait for all that this process has
            # queued on the GPU.
            driver = cuda.load()
            cuda.settle(
                lambda: driver.synchronize(gpu), "NIXL may still copy into this worker, restart it"
            )

    def _enter(self) -> None:
        """Make the GPU's CUDA context the calling thread's: UCX copies in the current one."""
        if self._gpu is not None:
            cuda.load().enter(self._gpu)


def _undo(agent: Any, remote: str | None, registered: Any) -> None:
    """Disconnect and deregister, in this order. Errors are those of broken connections."""
    try:
        if remote is not None:
            agent.remove_remote_agent(remote)
    except Exception as exc:
        log.debug("disconnecting a NIXL agent: %s", exc)
    try:
        agent.deregister_memory(registered)
    except Exception as exc:
        log.debug("deregistering memory with NIXL: %s", exc)


def _rows(iovec: Iovec, device: int) -> Iovec:
    """NIXL's descriptors: address, bytes, device."""
    rows = np.empty((len(iovec), 3), np.uint64)
    rows[:, :2] = iovec
    rows[:, 2] = device
    return rows


@contextmanager
def _failures(what: str) -> Iterator[None]:
    """Turn NIXL's exceptions, of many classes, into TransferFailed."""
    # The frames of their tracebacks would keep the agent alive.
    try:
        yield
    except TransferFailed:
        raise
    except Exception as exc:
        traceback.clear_frames(exc.__traceback__)
        raise TransferFailed(f"{what}: {exc}") from None


@contextmanager
def _same_affinity() -> Iterator[None]:
    # A new agent may pin the thread that makes it to other cores.
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        if os.sched_getaffinity(0) != before:
            os.sched_setaffinity(0, before)


ENV = "UCX_NET_DEVICES"


def confine(host: str) -> None:
    """Have UCX listen on loopback, where a worker on loopback does. On any other host the operator
    chooses: raises ConfigError unless UCX_NET_DEVICES is set."""
    # UCX opens a TCP port on every device it may use, and knows nothing of our login. So its
    # devices are chosen before the first agent is made.
    if os.environ.get(ENV):
        return
    if host not in ("127.0.0.1", "::1", "localhost"):
        raise ConfigError(
            f"--transports nixl: UCX listens without a login on every network device that it may "
            f"use. Name them in {ENV} (`ucx_info -d` lists them), for example eth0,mlx5_0:1"
        )
    os.environ[ENV] = "lo"
