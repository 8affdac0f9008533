"""How soon a NATS server that stops answering is noticed. The clock is virtual."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

import pytest

from pullfill.queue.pulse import EVERY_S, MANY, watch_pulse
from pullfill.runtime import timer_grid
from pullfill.runtime.health import Health

ABOUT_A_SECOND = 1.11


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time passes only while it waits, and then at once."""

    def __init__(self) -> None:
        self.now = 1000.0
        loop = self

        class Selector(selectors.SelectSelector):
            def select(self, timeout: float | None = None) -> Any:
                loop.now += timeout or 0.0
                return super().select(0)

        super().__init__(Selector())

    def time(self) -> float:
        return self.now


class Server:
    """Stands for the client of a server that is cut off at a moment."""

    is_connected = True
    _reading_task: asyncio.Task[None] | None = None

    def __init__(self) -> None:
        self.stats = {"in_msgs": 0}
        self.cut = asyncio.Event()

    async def flush(self, timeout: float) -> None:  # noqa: ASYNC109 - as the client's
        if self.cut.is_set():
            await asyncio.sleep(timeout)
        await asyncio.sleep(0.001)

    async def used(self, every_s: float, messages: int = 1) -> None:
        while not self.cut.is_set():
            self.stats["in_msgs"] += messages
            await asyncio.sleep(every_s)


def noticed(
    monkeypatch: pytest.MonkeyPatch, after_s: float, every_s: float, messages: int = 1
) -> float:
    """The longest time from a cut to its notice, over cuts at different moments from `after_s` on.

    every_s, messages: so many messages come so often."""
    monkeypatch.setattr(timer_grid, "_phase", 0.3)

    async def noticed_after(delay_s: float) -> float:
        server, loop = Server(), asyncio.get_running_loop()
        health = Health("nats", "nats://h:1")
        client: Any = server
        watch = asyncio.create_task(watch_pulse(client, health))
        use = asyncio.create_task(server.used(every_s, messages))
        await asyncio.sleep(delay_s)
        assert health.up
        server.cut.set()
        began = loop.time()
        while health.up:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for task in (watch, use):
            task.cancel()
        return loop.time() - began

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return max(runner.run(noticed_after(after_s + number / 23)) for number in range(46))


@pytest.mark.parametrize("every_s", [3600.0, 0.01, 0.9], ids=["idle", "used", "seldom used"])
def test_a_server_that_is_cut_off_is_noticed_within_about_a_second(
    every_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert noticed(monkeypatch, 5.0, every_s) < ABOUT_A_SECOND


@pytest.mark.parametrize("every_s", [3600.0, 0.9], ids=["idle", "seldom used"])
def test_where_few_messages_come_it_is_checked_half_as_often(
    every_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    took = noticed(monkeypatch, 15.0, every_s)
    assert ABOUT_A_SECOND < took < ABOUT_A_SECOND + EVERY_S


@pytest.mark.parametrize(("every_s", "messages"), [(0.9, 2), (14.0, MANY)], ids=["many", "burst"])
def test_where_many_messages_come_it_is_not(
    every_s: float, messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All the time, or just now."""
    assert noticed(monkeypatch, 15.2, every_s, messages) < ABOUT_A_SECOND


async def _ended() -> None:
    pass


def test_a_client_that_reads_no_more_is_given_up() -> None:
    """nats-py's `flush` returns at once then, as if the server had answered."""

    async def watched() -> str:
        server: Any = Server()
        server._reading_task = asyncio.create_task(_ended())
        return await asyncio.wait_for(watch_pulse(server, Health("nats", "nats://h:1")), 30)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert "cannot read" in runner.run(watched())
