"""The ports of a side (ports.py) over our own loop (engine/host.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pullfill.engine import requests
from pullfill.engine.host import EngineHooks, EngineHost, taken
from pullfill.errors import HandoffError


class OwnRequests(EngineHooks):
    """See `Submit`. It takes the outputs of its requests out of each step.

    client: the client index of these requests. Nobody else has it."""

    def __init__(self, host: EngineHost, client: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._host = host
        self._client = client
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        host.submit(lambda _core: host.use(self))

    async def run(self, request: Any, forgotten: Callable[[], object]) -> Any:
        name = request.request_id
        waiting = self._waiting[name] = self._loop.create_future()

        def add(core: Any) -> None:
            try:
                core.add_request(*core.preprocess_add_request(request))
            except Exception as exc:
                self._end(name, HandoffError(f"the engine refused the prompt: {exc}"))

        def forget(core: Any) -> None:
            core.abort_requests([name])
            forgotten()

        self._host.submit(add)
        try:
            return await waiting
        finally:
            del self._waiting[name]
            self._host.submit(forget)

    def on_outputs(self, outputs: dict[int, Any]) -> None:
        for output in getattr(taken(outputs, self._client), "outputs", ()):
            if requests.is_error(output):
                self._end(output.request_id, HandoffError("the engine failed the request"))
            elif output.finish_reason is not None:
                self._end(output.request_id, output)

    def _end(self, name: str, outcome: Any) -> None:
        """End the wait for a request. outcome: its output, or an error. Any thread."""

        def tell() -> None:
            waiting = self._waiting.get(name)
            if waiting is None or waiting.done():
                return
            if isinstance(outcome, Exception):
                waiting.set_exception(outcome)
            else:
                waiting.set_result(outcome)

        self._loop.call_soon_threadsafe(tell)
