"""Moments of `Acks` that a real server does not show on demand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pullfill.errors import QueueUnavailable
from pullfill.queue import acks
from pullfill.queue.acks import Acks


class Link:
    """A connection that takes everything. request: swallows a cancellation, as nats-py does while
    its send buffer is full, and brings no answer."""

    def __init__(self) -> None:
        self.up = True
        self.generation = 1
        self.said: list[str] = []

    async def wait_up(self, wait_s: float) -> bool:
        return True

    async def publish(self, subject: str, payload: bytes, *, now: bool = False) -> None:
        self.said.append(subject)

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise QueueUnavailable("no answer") from None


def made(link: Any) -> Acks:
    return Acks(link, lambda: "this")


async def test_a_pull_over_a_new_connection_comes_after_all_open_acks() -> None:
    link = Link()
    open_acks = made(link)
    await open_acks.push()
    for seq in (1, 2):
        await open_acks.send("this", f"ack.{seq}")
    await open_acks.push()
    assert link.said == ["ack.1", "ack.2"]
    await open_acks.push()
    assert len(link.said) == 2, "once over each connection"
    link.generation = 2
    await open_acks.push()
    assert link.said == ["ack.1", "ack.2"] * 2


async def test_an_ack_waits_only_while_pulls_follow_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a timer would wake the thread for the ack alone."""
    monkeypatch.setattr(acks, "BUSY_S", 0.2)
    monkeypatch.setattr(acks, "CONFIRM_S", 60.0)
    link = Link()
    open_acks = made(link)
    await open_acks.push()
    await open_acks.send("this", "ack.1")
    assert link.said == ["ack.1"], "nobody knows when the next pull comes"
    await open_acks.push()
    await open_acks.send("this", "ack.2")
    assert link.said == ["ack.1"]
    await open_acks.push()
    assert link.said == ["ack.1", "ack.2"]
    await asyncio.sleep(0.3)
    await open_acks.push()
    await open_acks.send("this", "ack.3")
    assert link.said == ["ack.1", "ack.2", "ack.3"]


async def test_a_delivery_of_another_stream_is_not_acked() -> None:
    link = Link()
    open_acks = made(link)
    await open_acks.send("that", "ack.1")
    await open_acks.send("this", "ack.1")
    assert link.said == ["ack.1"]


async def test_closing_ends_though_the_client_swallows_cancellations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("CONFIRM_S", 0.01), ("CLOSE_S", 0.05), ("ANSWER_S", 0.05), ("TRIES", 999)):
        monkeypatch.setattr(acks, name, value)
    open_acks = made(Link())
    await open_acks.send("this", "ack.1")
    await asyncio.sleep(0.05)  # its request is under way
    closing = asyncio.create_task(open_acks.close())
    done, _ = await asyncio.wait({closing}, timeout=5.0)
    assert done, "it waits for a task that goes on"
