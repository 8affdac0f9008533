"""`--nats URL,URL`: the members of one NATS cluster."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

import pytest

from pullfill.errors import QueueUnavailable
from pullfill.queue.contract import QueueConfig
from pullfill.queue.jetstream import JetStreamProducer
from tests.support.nats import NatsServer

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
        with pytest.raises(QueueUnavailable, match=r"nats://\*\*\*@127") as caught:
            await JetStreamProducer.connect(urls, config, wait_s=0.2)
    assert "u:p" not in str(caught.value)
