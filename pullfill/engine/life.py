"""The life of an engine, as the asyncio side sees it: becomes ready, may get stuck, dies, is freed.

    start ──▶ ready ──▶ dead: no more steps ──▶ stop: its memory may go ──▶ thread over

An engine that died keeps its memory until `stop` is called. The asyncio side calls `stop`, because
it knows who still copies from and to that memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.engine.environment import sentinels_of
from pullfill.engine.host import EngineHost
from pullfill.errors import EngineStuck, NotNow, PullfillError
from pullfill.runtime import log

logger = log.get("engine.life")


T = TypeVar("T")


class Life(ABC, Generic[T]):
    """An engine, from its start until its memory is free. asyncio thread.

    loop: of the asyncio thread.
    host: what takes its steps, an EngineHost. None until it is made.
    ready: what it is, once it is built.
    dead: set once the engine loop has ended (normally, by error, or given up).
    failure: why it ended, unless it was asked to.
    hangs: it was given up. The thread may still run, so do not wait for it, and do not touch the
    memory that it uses."""

    def __init__(self, loop: asyncio.AbstractEventLoop, host: Any = None) -> None:
        self.loop, self.host = loop, host
        self.ready: asyncio.Future[T] = loop.create_future()
        self.dead = asyncio.Event()
        self.failure: BaseException | None = None
        self.hangs = False

    def tell(self, function: Callable[..., object], *given: object) -> None:
        """Call this on the asyncio thread, unless its loop is closed. Any thread."""
        with contextlib.suppress(RuntimeError):  # it is closed
            self.loop.call_soon_threadsafe(function, *given)

    def give_up(self, why: str) -> None:
        """Treat the engine as dead: it is stuck for good, or one of its processes is gone."""
        self.hangs, self.failure = True, EngineStuck(why)
        self.dead.set()

    @abstractmethod
    async def halt(self) -> None:
        """Have it take no more steps, and wait for that. Frees no memory."""

    @abstractmethod
    async def stop(self) -> None:
        """Free its memory. Nothing may copy from or to that any more."""


class EngineLife(Life[T]):
    """Runs `make` (which imports vLLM and returns a host) and the host's loop on one thread.

    on_built: called on the engine thread once the engine exists. `ready` resolves to its result."""

    def __init__(self, make: Callable[[], EngineHost], on_built: Callable[[], T]) -> None:
        super().__init__(asyncio.get_running_loop())
        self._make = make
        self._on_built = on_built
        self._ranks: dict[int, int] = {}
        self._unused = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def halt(self, timeout_s: float = 5.0) -> None:
        """Ask the engine loop to end, and wait for it, at most `timeout_s`. Frees no memory.

        After this no callback of the engine is called, unless its step took longer."""
        if self.host is not None:
            self.host.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.dead.wait()

    async def stop(self, timeout_s: float = 4.0) -> None:
        """Free the engine's memory and wait for the thread, at most `timeout_s`.

        Nothing may copy from or to that memory any more. Does nothing if the engine hangs."""
        if self.hangs:
            return
        self._watch({})  # the ranks end now
        if self.host is not None:
            self.host.stop()
        self._unused.set()
        await asyncio.to_thread(self._thread.join, timeout_s)

    def give_up(self, why: str) -> None:
        super().give_up(why)
        self._unused.set()

    def fail(self, why: str) -> None:
        """`give_up`, from any thread."""
        self.tell(self.give_up, why)

    def _watch(self, ranks: dict[int, int]) -> None:
        """Give the engine up when the process of a rank ends. vLLM notices up to 10 s later.

        ranks: as `sentinels_of` returns them."""
        for descriptor in self._ranks:
            self.loop.remove_reader(descriptor)
        self._ranks = ranks
        for descriptor, rank in ranks.items():
            self.loop.add_reader(descriptor, self._rank_ended, rank)

    def _rank_ended(self, rank: int) -> None:
        self._watch({})
        self.give_up(f"the process of rank {rank} ended")

    def _run(self) -> None:
        try:
            host = self.host = self._make()
            host.build()
            self.tell(self._succeed, self._on_built(), sentinels_of(host.core))
            host.loop()
        except BaseException as exc:
            if not isinstance(exc, PullfillError):
                logger.exception("the engine died")
            self.failure = exc
            self.tell(self._fail, exc)
        finally:
            self.tell(self.dead.set)
        if self.host is not None:
            self._unused.wait()
            if not self.hangs:
                self.host.shutdown()

    def _succeed(self, built: T, ranks: dict[int, int]) -> None:
        self._watch(ranks)
        if not self.ready.done():
            self.ready.set_result(built)

    def _fail(self, exc: BaseException) -> None:
        if self.ready.done():
            return
        if not isinstance(exc, PullfillError):
            text = str(exc).strip() or repr(exc)
            # Memory that another process still holds, a hub that does not answer: it may pass.
            exc = NotNow(f"the engine did not start: {text.splitlines()[0]}")
        self.ready.set_exception(exc)


class EngineWatchdog:
    """Finds out whether an engine is stuck. Gives it up if it is lost. asyncio thread.

    Loading and warm-up are not watched.

        well ──no beat for stall_s while busy──▶ stuck ──as long again──▶ lost (for good)
          ◀──────────────── a beat ──────────────┘

    The engine loop beats at each round: at least once a second when idle, else after each step. So
    a step may take up to stall_s, for example with a long prompt.

    on_stuck: called with True when the engine is stuck, with False when it has recovered."""

    def __init__(
        self,
        engine: Life[Any],
        stall_s: float,
        on_stuck: Callable[[bool], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._stuck = self._lost = False  # as of the last look
        self._engine = engine
        self._stall_s = stall_s
        self._on_stuck = on_stuck
        self._clock = clock
        self._interval_s = min(1.0, stall_s / 8)
        self._looked = clock.monotonic()
        self._beat = -1
        self._still_s = 0.0

    def detail(self) -> dict[str, Any]:
        """For /ready. Empty while the engine is well."""
        return {"reason": self._complaint()} if self._stuck else {}

    def _complaint(self) -> str:
        pulse = self._engine.host.pulse()
        return (
            f"the engine is stuck in {pulse.busy or 'nothing'} for {self._still_s:.0f} s "
            f"with {pulse.requests} requests"
        )

    def look(self) -> None:
        """Look at the engine once, and act on a change. Call it about every `stall_s` / 8."""
        if self._lost:
            return
        now, pulse = self._clock.monotonic(), self._engine.host.pulse()
        # Bounded: a process that was stopped or starved must not find its engine stuck afterwards.
        passed = min(now - self._looked, 2 * self._interval_s)
        moved = pulse.beat != self._beat
        self._looked, self._beat = now, pulse.beat
        self._still_s = 0.0 if moved or not pulse.busy else self._still_s + passed
        if self._still_s >= 2 * self._stall_s:
            self._lost = True
            self._engine.give_up(self._complaint())
        elif (stuck := self._still_s >= self._stall_s) != self._stuck:
            self._stuck = stuck
            if stuck:
                logger.error(
                    "%s: taking no work; leaving if it takes as long again", self._complaint()
                )
            else:
                logger.warning("the engine takes steps again")
            self._on_stuck(stuck)

    async def run(self) -> None:
        """Look at the engine until it is lost."""
        while not self._lost:
            await asyncio.sleep(self._interval_s)
            self.look()
