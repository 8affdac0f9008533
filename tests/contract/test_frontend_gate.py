"""Admission under the real HTTP server: clients that stop reading, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from pullfill.frontend.admission import Admission
from pullfill.frontend.main import Server
from tests.support.waiting import soon

REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


async def endless(scope: Any, receive: Any, send: Any) -> None:
    """Streams until its client is gone."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    gone = asyncio.ensure_future(receive())
    try:
        while not gone.done():
            await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
            await asyncio.sleep(0)
    finally:
        gone.cancel()


async def always(timeout_s: float) -> bool:
    return True


@pytest.fixture
async def served() -> AsyncIterator[tuple[Admission, int]]:
    gate = Admission(endless, always, 8, send_s=0.4)
    config = uvicorn.Config(gate, port=0, log_level="critical", lifespan="off")
    server = Server(config)
    running = asyncio.create_task(server.serve())
    await soon(lambda: server.started)
    yield gate, server.servers[0].sockets[0].getsockname()[1]
    server.force_exit = server.should_exit = True
    with contextlib.suppress(asyncio.CancelledError):
        await running


@pytest.mark.essential
async def test_a_client_that_reads_nothing_is_left_and_one_that_goes_too(
    served: tuple[Admission, int],
) -> None:
    gate, port = served
    deaf_reader, deaf = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for client in (deaf, writer):
        client.write(REQUEST)
    await soon(lambda: gate.in_flight == 2)

    async def read() -> None:
        while await reader.read(1 << 20):
            pass

    reading = asyncio.create_task(read())
    await soon(lambda: gate.in_flight == 1)
    assert not reading.done(), "who reads is not left"
    writer.transport.abort()
    await soon(lambda: gate.in_flight == 0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    deaf.transport.abort()
    del deaf_reader
