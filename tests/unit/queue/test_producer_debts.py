"""What a producer could not remove from the stream, it removes later."""

from __future__ import annotations

import pytest

from pullfill.queue.contract import QueueConfig, Receipt
from pullfill.queue.nats_connection import NatsConnection, NoResponders
from pullfill.queue.producer import JetStreamProducer
from pullfill.queue.streams import NOT_SET


@pytest.mark.parametrize("known", ["stream", ""])
async def test_a_cancel_while_jobs_go_past_the_stream_is_done_later(
    known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream has no leader. After a reconnect not even its id is known."""
    config = QueueConfig(namespace="debts", compat_hash="0" * 16)
    producer = JetStreamProducer(NatsConnection("nats://127.0.0.1:1", "test"), config, NOT_SET)

    async def remove(_: object) -> bool:
        raise NoResponders("no leader")

    monkeypatch.setattr(producer, "_remove", remove)
    producer.streams.stream_id, producer._takers = known, True
    producer.connection.up = True
    assert producer.past_stream
    receipt = Receipt("job", 1, stream_id="stream")
    assert not await producer.cancel(receipt)
    assert producer._debts == {"job": receipt}
