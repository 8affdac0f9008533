"""Notices within about a second that a connected NATS server answers no more.

A server that is stopped, or behind a cable that is cut, keeps its connection open. So each
connection is looked at every EVERY_S, twice as often while it is used. If no message came since the
last look, the server is sent a PING of NATS's own protocol (6 bytes each way). One that does not
answer for WAIT_S counts as away. Its connection stays for some seconds more: a short hang costs no
reconnect.
"""

from __future__ import annotations

import asyncio

from nats.aio.client import Client

from pullfill import beat
from pullfill.health import Health

EVERY_S = 1.0
WAIT_S = 0.6
SLICES = 6
GIVE_UP_AFTER = 5
"""Looks without an answer."""
_HOPELESS_S = 3600


async def watch_pulse(client: Client, health: Health) -> str:
    """Keep `health` true for one connection. Returns why to give the connection up; "" if the
    client has ended it. The client's callbacks do not always tell: they can be stuck behind a
    socket that does not drain."""
    loop = asyncio.get_running_loop()
    heard = client.stats["in_msgs"]
    ping: asyncio.Task[None] | None = None
    missed, used = 0, False
    try:
        while client.is_connected:
            await asyncio.sleep(beat.left(loop.time(), EVERY_S / 2 if used else EVERY_S))
            used = client.stats["in_msgs"] != heard
            heard = client.stats["in_msgs"]
            if used and ping is None:
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
                missed += 1
                if missed == GIVE_UP_AFTER:
                    return "no answer to a PING"
                continue
            if ping.exception() is None:
                health.ok()
            ping, missed = None, 0  # one that failed: the connection ends by itself
        return ""
    finally:
        if ping is not None:
            ping.cancel()
