"""Sends outputs and load to the frontends of a decode worker, between two steps of its engine.

The engine's loop calls the hooks of `Frontends`. They give the outputs of each step to the request
server, which sends them, and the load when it has changed. `Frontends` also hands unfinished
requests back: when this worker shuts down, when its engine fails, and when requests find no free
blocks (`make_way`). The frontends then send them to other decode workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pullfill import wire
from pullfill.decode_worker.ledger import Ledger
from pullfill.decode_worker.prefix.read_leases import ReadLeases
from pullfill.decode_worker.request_server import RequestServer
from pullfill.engine import front_wire
from pullfill.engine.front_wire import LOAD_S, LoadReport
from pullfill.engine.kv_events import KvEvents
from pullfill.errors import NotNow
from pullfill.runtime import log
from pullfill.worker.engine_loop import EngineLoop

logger = log.get("decode_worker.frontends")

# Pause between the last messages to frontends and the end of the socket.
_FLUSH_S = 0.1


@dataclass(eq=False, repr=False)
class Frontends:
    """See the module.

    The engine thread calls its hooks, `before_step` to `on_aborted` (`EngineHooks` of
    engine/host.py). The asyncio thread calls all else."""

    loop: EngineLoop
    server: RequestServer
    # Returns the load, given whether this worker drains.
    load: Callable[[bool], LoadReport]
    # Has the engine's loop take a turn after so many seconds.
    wake_after: Callable[[float], object]
    events: KvEvents
    ledger: Ledger
    leases: ReadLeases
    _look_at: float = field(init=False, default=0.0)
    _told: LoadReport | None = field(init=False, default=None)
    _tell_at: float = field(init=False, default=0.0)
    _woken: bool = field(init=False, default=False)

    def before_step(self) -> None:
        if (now := time.monotonic()) >= self._look_at:
            self._look_at = now + 0.05  # nothing that is looked at needs a faster reaction
            self.server.check_silent()
            # The asyncio thread does that, unless it hangs.
            self.ledger.tick_overdue()
            self.make_way()
            self.events.look()
        self.tell_load(now)

    def tell_load(self, now: float) -> None:
        """Send the load when it has changed, at most every LOAD_S. Cheap.

        now: seconds of a monotonic clock."""
        if now < self._tell_at:
            if not self._woken:
                # The loop may sleep for a second before its next turn.
                self._woken = True
                self.wake_after(self._tell_at - now)
            return
        self._woken, self._tell_at = False, now + LOAD_S
        report = self.load(self.server.draining)
        if report != self._told:
            self._told = report
            self.server.tell(front_wire.LOAD, wire.encode(report))

    def after_step(self, running: int) -> None:
        """Outputs come to `on_outputs`."""

    def on_outputs(self, outputs: dict[int, Any]) -> None:
        self.server.send_outputs(outputs)

    def on_failed_step(self, untouched: set[str]) -> None:
        """Migrate the requests that cannot have caused the failure of this engine step.

        The step has raised, so this worker ends. The frontends suspect the requests that were in
        the step, once they notice that this process has ended.

        untouched: IDs of the requests that wait in vLLM's queue and were not in the step."""
        self.server.start_drain()
        self.server.receive()  # what has arrived, but was not read yet, migrates, too
        self.server.migrate(untouched | self.server.coming())
        time.sleep(_FLUSH_S)

    def on_aborted(self, request_ids: set[str]) -> None:
        """Migrate requests that vLLM has aborted, as when somebody pauses stock `vllm serve`."""
        self.server.migrate(request_ids)

    def make_way(self) -> None:
        """Migrate requests that wait for blocks while blocks are in quarantine.

        The writer or reader of these blocks may be stopped for ever. vLLM would wait as long."""
        # So many seconds may requests wait for free blocks while no request runs.
        ids = self.loop.waiting_for_blocks(5.0)
        if ids and (blocks := self.ledger.quarantined_blocks + self.leases.unproved_blocks):
            logger.warning(
                "migrating %d requests: no room for them while %d blocks are in quarantine; "
                "continue or end the worker that is stopped",
                len(ids),
                blocks,
            )
            self.server.migrate(ids)

    async def begin(self, host: str, port: int) -> None:
        """Listen for frontends. Raises NotNow."""

        def listen() -> None:
            self.loop.use(self)
            self.server.bind(host, port)

        await self.loop.call(listen)

    @property
    def uncached_tokens(self) -> int:
        """Number of tokens to be computed before all requests generate, as frontends were told."""
        return self._told.uncached_tokens_queued if self._told else 0

    async def idle(self, dead: asyncio.Event) -> None:
        """Wait until two checks in a row find no request, here or in a job.

        By the second check all outputs are sent. Blocks in quarantine do not matter: this process
        ends, and their memory is never reused. A writer that wakes up later writes into its own
        mapping of an unlinked file.

        dead: set when the engine has ended."""
        quiet = 0
        while quiet < 2 and not dead.is_set():
            busy = self.server.active_requests or self.ledger.waiting_requests
            quiet = 0 if busy else quiet + 1
            await asyncio.sleep(0.05)

    async def migrate(self) -> None:
        """Migrate all requests.

        A stuck engine thread cannot do it. After 1 s this gives up, and the frontends notice when
        this process has ended."""
        logger.warning("migrating %d unfinished requests", self.server.active_requests)
        with contextlib.suppress(TimeoutError, NotNow):
            async with asyncio.timeout(1.0):
                await self.loop.call(self.server.migrate)
                await asyncio.sleep(_FLUSH_S)
