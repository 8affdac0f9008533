"""The life of an engine, as the asyncio side sees it: becomes ready, may die, is stopped.

    start ──▶ ready ──▶ dead: no more steps ──▶ stop: its memory may go ──▶ thread over

An engine that died keeps its memory until `stop` is called. The asyncio side calls `stop`, because
it knows who still copies from and to that memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from pullfill.engine.environment import RankWatch, sentinels_of
from pullfill.engine.host import EngineHost
from pullfill.engine.watchdog import Pulse
from pullfill.errors import EngineStuck, NotNow, PullfillError
from pullfill.runtime import log

logger = log.get("engine.life")


T = TypeVar("T")


class EngineLife(Generic[T]):
    """Runs `make` (which imports vLLM and returns a host) and the host's loop on one thread.

    on_built: called on the engine thread once the engine exists. `ready` resolves to its result.
    dead: set once the engine loop has ended (normally, by error, or given up by the watchdog).
    failure: why it ended, unless it was asked to.
    hangs: the watchdog gave it up. The thread may still run, so do not wait for it, and do not
    touch the memory that it uses.
    """

    def __init__(
        self, make: Callable[[], EngineHost], on_built: Callable[[EngineHost, Any], T]
    ) -> None:
        self._make = make
        self._on_built = on_built
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[T] = self._loop.create_future()
        self.dead = asyncio.Event()
        self.failure: BaseException | None = None
        self.host: EngineHost | None = None
        self.hangs = False
        self._ranks: RankWatch | None = None
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
        if self._ranks is not None:
            self._ranks.stop()
        if self.host is not None:
            self.host.stop()
        self._unused.set()
        await asyncio.to_thread(self._thread.join, timeout_s)

    def pulse(self) -> Pulse:
        """What the thread does now."""
        assert self.host is not None, "watched before it was built"
        return self.host.pulse()

    def give_up(self, why: str) -> None:
        """Treat the engine as dead: it is stuck for good, or one of its processes is gone.

        asyncio thread."""
        self.hangs, self.failure = True, EngineStuck(why)
        self.dead.set()
        self._unused.set()

    def fail(self, why: str) -> None:
        """`give_up`, from any thread."""
        self._call(self.give_up, why)

    def _run(self) -> None:
        try:
            host = self._make()
            self.host = host
            host.run(lambda core: self._built(host, core))
        except BaseException as exc:
            if not isinstance(exc, PullfillError):
                logger.exception("the engine died")
            self.failure = exc
            self._call(self._fail, exc)
        finally:
            self._call(self.dead.set)
        if self.host is not None:
            self._unused.wait()
            if not self.hangs:
                self.host.shutdown()

    def _built(self, host: EngineHost, core: Any) -> None:
        built = self._on_built(host, core)
        self._ranks = RankWatch(sentinels_of(core), self.fail)
        self._call(self._succeed, built)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _succeed(self, built: T) -> None:
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
