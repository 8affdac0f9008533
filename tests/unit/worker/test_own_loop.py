"""Requests that a worker sends its own engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.errors import HandoffError
from pullfill.worker.own_loop import OwnRequests


class Host:
    """Runs what is submitted at once. refuses: the engine takes no request."""

    def __init__(self) -> None:
        self.refuses = False
        self.aborted: list[str] = []
        self.hooks: list[Any] = []
        self.preprocess_add_request = lambda request: (request, 0)

    def submit(self, work: Callable[[Any], None]) -> None:
        work(self)

    def use(self, hooks: Any) -> None:
        self.hooks.append(hooks)

    def add_request(self, request: Any, wave: int) -> None:
        if self.refuses:
            raise ValueError("too long")

    def abort_requests(self, names: list[str]) -> None:
        self.aborted += names


def output(reason: str | None) -> Any:
    return SimpleNamespace(request_id="r", finish_reason=reason)


async def test_a_request_ends_with_its_last_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pullfill.engine.requests.is_error", lambda o: o.finish_reason == "error")
    host: Any = Host()
    requests, forgotten = OwnRequests(host, -1), list[bool]()

    async def ends(*outputs: Any) -> Any:
        running = asyncio.create_task(
            requests.run(SimpleNamespace(request_id="r"), lambda: forgotten.append(True))
        )
        await asyncio.sleep(0)
        ours = SimpleNamespace(outputs=list(outputs), scheduler_stats=None)
        step = {-1: ours, 0: SimpleNamespace(scheduler_stats=None)}
        (hooks,) = host.hooks
        hooks.on_outputs(step)
        assert list(step) == [0]
        return await running

    assert (await ends(output(None), output("stop"))).finish_reason == "stop"
    with pytest.raises(HandoffError, match="failed"):
        await ends(output("error"))
    host.refuses = True
    with pytest.raises(HandoffError, match="too long"):
        await ends()
    assert host.aborted == ["r"] * 3
    assert forgotten == [True] * 3
