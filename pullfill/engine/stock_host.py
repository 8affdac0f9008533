"""vLLM's own engine core, in the process that `vllm serve` starts for it, as our host.

    run_busy_loop ─▶ _process_input_queue ─▶ _process_engine_step = our turn (host.py)

So our work, the frontends' sockets and what the sides report come between two steps, as in our own
loop. And the engine sleeps while all its requests wait for KV, which vLLM's loop does not. The rest
stays vLLM's: its sockets, its clients, its shutdown, data parallel.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from pullfill.engine.host import EngineHost
from pullfill.engine.requests import FRONTENDS, OWN_CLIENT


def core_above() -> Any | None:
    """Return the EngineCoreProc that is being made, for the connector that it makes.

    vLLM gives a connector its configuration, and never the engine core. But that is on the stack
    of whoever constructs the connector. None: the engine has another loop, as in vLLM's `LLM`."""
    from vllm.v1.engine.core import EngineCoreProc

    frame = sys._getframe(1)
    while (above := frame.f_back) is not None:
        frame = above
        if isinstance(found := frame.f_locals.get("self"), EngineCoreProc):
            return found
    return None


class StockHost(EngineHost):
    """See the module. It is made while the core is being made: vLLM has no scheduler yet.

    core: vLLM's EngineCoreProc. Some of its methods are replaced.
    stays: called in each turn after vLLM was told to shut down. Returns whether it must go on, also
    without a request. on_end: called when the core takes no more steps, before vLLM frees its
    memory. Engine thread."""

    def __init__(self, core: Any, stays: Callable[[], bool], on_end: Callable[[], object]) -> None:
        super().__init__(core.vllm_config)
        self.core = core
        # Work for the turns. The engine takes no request while it is being made.
        self._entries: deque[Callable[[], object]] = deque()
        put, shutdown, works = core.input_queue.put_nowait, core.shutdown, core.has_work
        self._abort_outputs = core._send_abort_outputs_to_client

        def put_and_wake(item: Any) -> None:
            put(item)
            self.wake()

        def end() -> None:
            on_end()
            shutdown()

        core.process_input_queue_block = False  # a turn waits for that queue, too
        core.input_queue.put_nowait = put_and_wake
        core._process_engine_step = self.turn
        core._send_abort_outputs_to_client = self._aborted
        core.shutdown = end
        core.has_work = lambda: (not core.is_running() and stays()) or works()

    def enter(self, work: Callable[[], object]) -> None:
        self._entries.append(work)
        self.wake()

    def register(self, socket: Any, handler: Callable[[], None]) -> None:
        """Poll it from the first turn on: a frontend may send a request at once."""
        self.enter(lambda: super(StockHost, self).register(socket, handler))

    def wait(self, done: Callable[[], bool]) -> None:
        """Run what is submitted until `done()`, before vLLM's loop begins. Engine thread."""
        while not done():
            super()._take_in(50)
        self._doing = ""  # the watchdog must not count what vLLM does next

    def turn(self) -> bool:
        if self.core.engines_running:
            self._timeout = 0  # the other ranks of a data parallel group wait for this one
        return super().turn()

    def _take_in(self, timeout_ms: int) -> bool:
        came, queue = super()._take_in(timeout_ms), self.core.input_queue
        while self._entries:  # after the wait, which one of them may have ended
            came = True
            self._entries.popleft()()
        while not queue.empty():
            came = True
            self.core._handle_client_request(*queue.get_nowait())
        if came:
            self.core._maybe_publish_request_counts()  # before the step, as vLLM does
        return came

    def _has_requests(self, quiet: bool) -> bool:
        return bool(self.core.scheduler.has_requests())  # vLLM does not end before that is false

    def _pause(self, executed: bool) -> int:
        scheduler = self.core.scheduler
        if not scheduler.requests and scheduler.has_requests():
            return 0
        return super()._pause(executed)

    def _give(self, outputs: dict[int, Any]) -> None:
        ours = {client: outputs.pop(client) for client in list(outputs) if _is_ours(client)}
        for batch in ours.values():
            if (stats := batch.scheduler_stats) is not None:
                # vLLM tells them once, and its own servers count them.
                batch.scheduler_stats = None
                outputs.setdefault(next(iter(outputs), 0), type(batch)()).scheduler_stats = stats
        super()._give(ours)
        for output in outputs.items():
            self.core.output_queue.put_nowait(output)

    def _aborted(self, request_ids: list[str], client: int) -> None:
        """vLLM has aborted these: it ends, or somebody has paused it."""
        if not _is_ours(client):
            self._abort_outputs(request_ids, client)
            return
        for hooks in self._hooks:
            tell = hooks.on_aborted if self.core.is_running() else hooks.on_failed_step
            tell(set(request_ids))
        self.wake()  # a step tells the model runner, and vLLM does not end before it


def _is_ours(client: int) -> bool:
    return client == OWN_CLIENT or client >= FRONTENDS
