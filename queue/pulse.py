"""Notices within about a second that a connected NATS server answers no more.

A server that is stopped, or behind a cable that is cut, keeps its connection open. So each
connection is sent a PING of NATS's own protocol (6 bytes each way) after EVERY_S without a
message. The connection itself is given up later, by the client: a short hang costs no reconnect.
"""

from __future__ import annotations

import asyncio

from nats.aio.client import Client

from pullfill.health import Health

EVERY_S = 0.4
WAIT_S = 0.7
SLICES = 7
_HOPELESS_S = 3600


async def watch_pulse(client: Client, health: Health) -> None:
    """Keep `health` true for one connection, until cancelled."""
    heard = client.stats["in_msgs"]
    ping: asyncio.Task[None] | None = None
    try:
        while True:
            await asyncio.sleep(EVERY_S)
            if ping is None and client.stats["in_msgs"] != heard:
                heard = client.stats["in_msgs"]
                health.ok()
                continue
            # One at a time, and never cancelled while the connection stands: the client fails on
            # the answer to a PING whose waiter is gone.
            ping = ping or asyncio.create_task(client.flush(timeout=_HOPELESS_S))
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
