"""When a producer learns the depth of the queue anew."""

from __future__ import annotations

import pytest

from pullfill.clock import SYSTEM_CLOCK
from pullfill.queue.contract import QueueConfig
from pullfill.queue.depth import EMPTY
from pullfill.queue.nats_connection import NatsConnection
from pullfill.queue.producer import STEADY_REFRESH_S, JetStreamProducer
from pullfill.queue.streams import NOT_SET
from pullfill.runtime import timer_grid

PHASES = [number / 16 for number in range(16)]
"""Each process has a grid of its own. With 16 of them, one is due soon after any moment."""


def used_producer(asks: bool) -> JetStreamProducer:
    """A producer that has just published a job, and has just got a report of the depth."""
    config = QueueConfig(namespace="refresh", compat_hash="0" * 16)
    producer = JetStreamProducer(NatsConnection("nats://127.0.0.1:1", "test"), config, NOT_SET)
    producer._answering, producer._shared.asks = True, asks
    producer._on_report(EMPTY, SYSTEM_CLOCK.monotonic())
    return producer


async def test_after_a_report_no_other_producer_asks_within_the_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for phase in PHASES:
        monkeypatch.setattr(timer_grid, "_phase", phase)
        left = used_producer(asks=False)._left()
        assert 0.9 * STEADY_REFRESH_S < left <= 2 * STEADY_REFRESH_S, phase


async def test_an_asker_asks_within_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    for phase in PHASES:
        monkeypatch.setattr(timer_grid, "_phase", phase)
        assert used_producer(asks=True)._left() <= STEADY_REFRESH_S, phase
