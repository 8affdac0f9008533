"""Requests that wait for a decode worker, on the event loop that frontends use."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.frontend.dispatch import Waiting


def flight(name: str, deadline: float) -> Any:
    return SimpleNamespace(request_id=name, deadline=deadline)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_deadline_that_has_passed_expires_at_once(loop: str) -> None:
    """uvloop gives no timer for a time that has passed."""
    module = pytest.importorskip(loop, reason=f"{loop} is not installed")

    async def expire() -> list[str]:
        ended: list[str] = []

        def end(one: Any) -> None:
            waiting.drop(one.request_id)
            ended.append(one.request_id)

        waiting = Waiting(lambda one, now: None, end)
        now = asyncio.get_running_loop().time()
        waiting.hold(flight("late", now - 1.0))
        waiting.hold(flight("later", now - 0.5))
        async with asyncio.timeout(5.0):
            while len(ended) < 2:  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0.001)
        return sorted(ended)

    with asyncio.Runner(loop_factory=module.new_event_loop) as runner:
        assert runner.run(expire()) == ["late", "later"]
