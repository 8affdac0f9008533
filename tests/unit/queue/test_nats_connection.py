"""Dialling NATS, where the client does not do what it should."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from pullfill.errors import QueueUnavailable
from pullfill.queue.nats_connection import ApiError, NatsConnection


async def test_a_start_ends_in_its_time_though_a_cancellation_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It went on for ever: the server answered in the moment in which the time was over."""

    async def dial(_: NatsConnection) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60.0)
        raise ApiError(500, 10047, "insufficient storage")

    monkeypatch.setattr(NatsConnection, "_dial", dial)
    async with asyncio.timeout(20.0):
        with pytest.raises(QueueUnavailable, match=r"raise jetstream\.max_file_store"):
            await NatsConnection("nats://127.0.0.1:1", "x").start(0.01)
