"""A failed attempt to reach a decode worker's memory is remembered. That all of its jobs share one:
tests/contract/test_handoff.py"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.errors import PeerUnavailable
from pullfill.prefill_worker.reach import OutOfReach, SharedTransferWorker
from tests.support.fakes import FakeClock


class Port:
    """What connecting does: waits for `go`, then `failure` or a transfer worker that counts its
    ends."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.attempts = self.closed = 0
        self.clock = FakeClock()
        self.go = asyncio.Event()
        self.go.set()
        self.shared = SharedTransferWorker(self._open, "decode-1", self.clock)

    async def _open(self, *_: Any) -> Any:
        self.attempts += 1
        await self.go.wait()
        if self.failure is not None:
            raise self.failure
        return SimpleNamespace(
            close=self._close, busy=False, transport="tcp", why_not_better=("shm: another host",)
        )

    def _close(self) -> None:
        self.closed += 1


@pytest.fixture
def port() -> Port:
    return Port()


async def test_each_failure_is_remembered_longer_until_something_changes(
    port: Port,
) -> None:
    port.failure = PeerUnavailable("no answer")
    waits = []
    for _ in range(7):
        before, began = port.attempts, port.clock.now
        while port.attempts == before:
            with pytest.raises(OutOfReach):
                await port.shared.connecting()
            port.clock.advance(0.5)
        waits.append(port.clock.now - began)
    assert waits == sorted(waits)
    assert waits[2] > waits[1], "longer each time"
    assert waits[-1] == waits[-2], "up to a bound"
    port.failure = None
    port.shared.forgive(())
    assert await port.shared.connecting() is port.shared.current


async def test_an_attempt_that_outlives_the_link_leaves_nothing_open(port: Port) -> None:
    port.go.clear()
    asked = port.shared.connecting()
    await asyncio.sleep(0)
    port.shared.close()
    port.go.set()
    with pytest.raises(OutOfReach, match="gone"):
        await asked
    assert (port.shared.current, port.closed) == (None, 1)
    with pytest.raises(OutOfReach, match="gone"):
        await port.shared.connecting()
    assert port.attempts == 1
