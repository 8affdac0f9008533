"""Servers on a port of their own that leave no connection behind when they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from pullfill.runtime.lifecycle import stop_listening

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def until_closed(server: asyncio.Server) -> AsyncIterator[tuple[str, int]]:
    """Host and port of `server`, which is closed at the end."""
    host, port = server.sockets[0].getsockname()[:2]
    try:
        yield host, port
    finally:
        await stop_listening(server)


@asynccontextmanager
async def listening(handler: Handler) -> AsyncIterator[tuple[str, int]]:
    """Host and port where `handler` gets each connection."""
    async with until_closed(await asyncio.start_server(handler, "127.0.0.1", 0)) as address:
        yield address


@asynccontextmanager
async def serving(app: web.Application, *, cancelling: bool = False) -> AsyncIterator[str]:
    """The URL where `app` answers. cancelling: a handler is cancelled when its client leaves."""
    runner = web.AppRunner(app, handler_cancellation=cancelling)
    await runner.setup()
    loop = asyncio.get_running_loop()
    assert runner.server is not None
    server = await loop.create_server(runner.server, "127.0.0.1", 0)
    try:
        async with until_closed(server) as (host, port):
            yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
