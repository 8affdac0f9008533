"""Notices within about a second that a connected NATS server answers no more.

A server that is stopped, or behind a cable that is cut, keeps its connection open. So each
connection is sent a PING of NATS's own protocol (6 bytes each way) after EVERY_S without a
message. The connection itself is given up later, by the client: a short hang costs no reconnect.
"""

from __future__ import annotations

import asyncio

from pullfill.health import Health
from pullfill.queue.client import Client

EVERY_S = 0.4
WAIT_S = 0.7
SLICES = 7


async def watch_pulse(client: Client, health: Health) -> None:
    """Keep `health` true for one connection, until cancelled."""
    heard = client.messages
    ping: asyncio.Task[None] | None = None
    try:
        while True:
            await asyncio.sleep(EVERY_S)
            if ping is None and client.messages != heard:
                heard = client.messages
                health.ok()
                continue
            # One at a time, however long its answer takes.
            ping = ping or asyncio.create_task(client.flush())
            for _ in range(SLICES):  # time in which this process stood still counts as one slice
                if (await asyncio.wait({ping}, timeout=WAIT_S / SLICES))[0]:
                    break
            else:
                health.failed(f"no answer for {WAIT_S:g} s")
                continue
            if ping.exception() is None:
                health.ok()
            ping = None  # one that failed: the connection ends by itself
    finally:
        if ping is not None:
            ping.cancel()
