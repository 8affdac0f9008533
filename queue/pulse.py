"""Notices that a connected NATS server has stopped answering.

A server that is stopped, or behind a cut cable, keeps its connection open. So each connection is
checked every EVERY_S. It is checked twice as often while it is used, and half as often while few
messages come, because each check wakes the process twice. If no message has just come, the check
sends a PING of NATS's own protocol (6 bytes each way). A server that does not answer for WAIT_S
counts as away. Its connection is kept for some seconds more, so a short hang costs no reconnect.

The client stops reading for good at a message whose headers it cannot decode, and at the answer to
a PING whose waiter is gone. It says nothing of it, and its `flush` then returns at once. Such a
connection is given up.
"""

from __future__ import annotations

import asyncio

from nats.aio.client import Client

from pullfill.runtime import timer_grid
from pullfill.runtime.health import Health

EVERY_S = 0.5
WAIT_S = 0.6
FEW, IN_S, MANY = 20, 10.0, 8
"""Few messages come when there were fewer than FEW in the last IN_S. That ends when one check finds
MANY new messages."""
SLICES = 6
GIVE_UP_AFTER = 5
"""Checks without an answer, after which the connection is given up."""
_HOPELESS_S = 3600


async def watch_pulse(client: Client, health: Health) -> str:
    """Keep `health` up to date for one connection, until the connection must be given up.

    Returns the reason, or "" if the client has closed the connection. The client's callbacks alone
    are not enough: they can be stuck behind a socket that does not drain."""
    loop = asyncio.get_running_loop()
    heard = counted = client.stats["in_msgs"]
    counted_at, few = loop.time(), False
    ping: asyncio.Task[None] | None = None
    missed, used = 0, False
    try:
        while client.is_connected:
            every_s = 2 * EVERY_S if few else EVERY_S / 2 if used else EVERY_S
            await asyncio.sleep(timer_grid.left(loop.time(), every_s))
            if client._reading_task is not None and client._reading_task.done():
                return "a message that the client cannot read" if client.is_connected else ""
            new, heard = client.stats["in_msgs"] - heard, client.stats["in_msgs"]
            used, quick = new > 0, every_s < EVERY_S
            if new >= MANY:
                few = False
            elif loop.time() - counted_at >= IN_S:
                few = heard - counted < FEW
                counted, counted_at = heard, loop.time()
            # After a whole EVERY_S the message may be as old, so the server is asked all the same.
            if used and quick and ping is None:
                health.ok()
                continue
            # One PING at a time, and not cancelled while the connection is open: the client fails
            # on the answer to a PING whose waiter is gone.
            ping = ping or asyncio.create_task(client.flush(timeout=_HOPELESS_S))
            # In slices: if this process is stopped for a while, that counts as one slice.
            for _ in range(SLICES):
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
            ping, missed = None, 0  # a failed PING: the connection ends by itself
        return ""
    finally:
        if ping is not None:
            ping.cancel()
