"""A producer with several NATS servers (`--nats URL,URL`), and with answers that make no sense."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

import pytest

from pullfill.errors import QueueUnavailable
from pullfill.queue.contract import QueueConfig
from pullfill.queue.jetstream import JetStreamProducer
from tests.support.nats import NatsServer, until

HANG_S = 15.0


async def test_one_member_of_a_cluster_that_answers_is_enough(tmp_path: Path) -> None:
    server, config = NatsServer(tmp_path), QueueConfig("test", secrets.token_hex(8))
    await server.start()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        urls = f"nats://u:p@127.0.0.1:{nobody.getsockname()[1]}, {server.url}"
        for _ in range(4):  # in any order
            producer = await JetStreamProducer.connect(urls, config, wait_s=HANG_S)
            assert producer.available
            await producer.close()
        server.stop()
        with pytest.raises(QueueUnavailable, match=r"nats://127") as caught:
            await JetStreamProducer.connect(urls, config, wait_s=0.2)
    assert "u:p" not in str(caught.value)


async def test_an_answer_that_makes_no_sense_does_not_keep_the_queue_shut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task that asks for the depth must survive such an answer: it also closes the breaker."""
    config = QueueConfig("test", secrets.token_hex(8), publish_timeout_s=5.0)
    server = NatsServer(tmp_path)
    await server.start()
    producer = await JetStreamProducer.connect(server.url, config, wait_s=HANG_S)

    async def api(*asked: object) -> object:
        return {"what": "is this"}

    try:
        with monkeypatch.context() as odd:
            odd.setattr(producer.connection, "api", api)
            await producer.publish("a", b"", 10)
            await until(lambda: not producer.available)
        await until(lambda: producer.available)
    finally:
        await producer.close()
        server.stop()
