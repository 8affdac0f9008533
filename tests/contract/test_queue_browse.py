"""`pullfill queue ls|show|dead|purge` over a real NATS server."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pullfill import wire
from pullfill.deploy import cli
from pullfill.errors import ConfigError
from pullfill.queue.contract import QueueConfig
from pullfill.queue.jetstream import JetStreamConsumer, JetStreamProducer
from pullfill.wire import PrefillJob, u32
from tests.support.nats import NatsServer

WAIT_S = 15.0
NAME = secrets.token_hex(8)


@pytest.fixture
async def queue(tmp_path: Path) -> AsyncIterator[tuple[NatsServer, JetStreamConsumer]]:
    """Two jobs that wait, one in flight, one that is dead, and an empty queue of the same name in
    a namespace whose name begins alike."""
    server = NatsServer(tmp_path)
    config = QueueConfig("test", NAME, publish_timeout_s=5.0)
    await server.start()
    try:
        async with filled(server, config) as consumer:
            yield server, consumer
    finally:
        server.stop()


@asynccontextmanager
async def filled(server: NatsServer, config: QueueConfig) -> AsyncIterator[JetStreamConsumer]:
    producer = await JetStreamProducer.connect(server.url, config, wait_s=WAIT_S)
    consumer = await JetStreamConsumer.connect(server.url, config, wait_s=WAIT_S)
    other = await JetStreamProducer.connect(server.url, QueueConfig("test-2", NAME), wait_s=WAIT_S)
    await producer.publish("poison", b"no job", 10)
    [bad] = await consumer.pull(1, 1, WAIT_S)
    await bad.term("cannot be read")
    await producer.publish("held", b"", 20)
    [held] = await consumer.pull(1, 1, WAIT_S)
    job = PrefillJob(
        job_id="job-1", incarnation="i", decode_instance="decode-1", request_id="cmpl-7",
        compat=NAME, token_ids=u32.pack(range(700)), hit_tokens=0, block_ids=u32.pack([1]),
        block_size=32, timeout_s=5.0,
    )  # fmt: skip
    await producer.publish("job-1", wire.encode(job), 700)
    await producer.publish("job-2", b"no job", 30)
    yield consumer
    await held.ack()
    await asyncio.gather(producer.close(), consumer.close(), other.close())


async def pullfill(server: NatsServer, *words: str, answer: str | None = None) -> str:
    where = ("--etcd", "http://h:1", "--nats", server.url, "--namespace", "test")

    def run() -> Any:
        return CliRunner().invoke(cli.app, ["queue", *words, *where], input=answer)

    result = await asyncio.to_thread(run)
    if result.exception is not None:
        raise result.exception
    return str(result.stdout)


async def read(server: NatsServer, *words: str) -> Any:
    return json.loads(await pullfill(server, *words, "--json"))


async def test_look_and_purge(queue: tuple[NatsServer, JetStreamConsumer]) -> None:
    server, _ = queue
    [row] = await read(server, "ls")
    assert {k: row[k] for k in ("name", "jobs", "tokens", "in_flight", "dead")} == {
        "name": NAME, "jobs": 3, "tokens": 20 + 704 + 30, "in_flight": 1, "dead": 1,
    }  # fmt: skip
    assert 0 < row["oldest_age_s"] < 60
    rows = (await read(server, "show"))[NAME]
    assert [(r["job_id"], r["tokens"]) for r in rows] == [
        ("held", 20), ("job-1", 700), ("job-2", 30),
    ]  # fmt: skip
    assert (rows[1]["request_id"], rows[1]["decode_instance"]) == ("cmpl-7", "decode-1")
    assert rows[1]["lane"].startswith("normal-")
    assert rows[2]["request_id"] == ""
    assert len((await read(server, "show", NAME, "--most", "2"))[NAME]) == 2
    [letter] = (await read(server, "dead", NAME))[NAME]
    assert (letter["job_id"], letter["reason"]) == ("poison", "cannot be read")
    assert letter["deliveries"] == 1
    for words in (("ls",), ("show",), ("dead",)):
        assert NAME in await pullfill(server, *words), "as a table"

    with pytest.raises(ConfigError, match="nothing was deleted"):
        await pullfill(server, "purge", answer="n\n")
    assert await read(server, "purge", "--dead", "--yes") == {NAME: 1}
    assert f"{NAME}: 3 jobs deleted" in await pullfill(server, "purge", NAME, answer="y\n")
    [row] = await read(server, "ls")
    assert (row["jobs"], row["dead"]) == (0, 0)
    assert "no job" in await pullfill(server, "show")
    with pytest.raises(ConfigError, match=f"no queue 'x' in namespace test; there are: {NAME}"):
        await pullfill(server, "show", "x")
