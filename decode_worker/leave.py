"""Migrates unfinished requests: gives them to their frontends, which use other decode workers.

This happens when this worker shuts down, when its engine fails, and when requests find no free
blocks (`make_way`).

`look`, `make_way` and `last_words` run on the engine thread, all else on the asyncio thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from pullfill.decode_worker.ledger import Ledger
from pullfill.decode_worker.request_server import RequestServer
from pullfill.engine.host import EngineHost
from pullfill.engine.thread import EngineThread
from pullfill.runtime import log

logger = log.get("decode_worker.leave")

# Pause between the last messages to frontends and the end of the socket.
_FLUSH_S = 0.1


async def idle(engine: EngineThread[Any], request_server: RequestServer, ledger: Ledger) -> None:
    """Wait until two checks in a row find no request, here or in a job.

    By the second check all outputs are sent. Blocks in quarantine do not matter: this process ends,
    and their memory is never reused. A writer that wakes up later writes into its own mapping of an
    unlinked file."""
    quiet = 0
    while quiet < 2 and not engine.dead.is_set():
        busy = request_server.active_requests or ledger.waiting_requests
        quiet = 0 if busy else quiet + 1
        await asyncio.sleep(0.05)


async def migrate_unfinished(
    host: EngineHost, request_server: RequestServer, within_s: float = 1.0
) -> None:
    """Migrate all requests.

    within_s: a stuck engine thread cannot do it. After this time this gives up, and the frontends
    notice when this process has ended."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await host.call(lambda _: request_server.migrate())
            await asyncio.sleep(_FLUSH_S)


def last_words(request_server: RequestServer, untouched: set[str]) -> None:
    """Migrate the requests that cannot have caused the failure of this engine step.

    The step has raised, so this worker ends. The frontends suspect the requests that were in the
    step, once they notice that this process has ended. Engine thread.

    untouched: IDs of the requests that wait in vLLM's queue and were not in the step."""
    request_server.start_drain()
    request_server.receive()  # Requests that have arrived, but were not read yet, migrate, too.
    request_server.migrate(untouched | request_server.coming())
    time.sleep(_FLUSH_S)


def look(request_server: RequestServer, ledger: Ledger, leased: int = 0) -> None:
    """Periodic work of the engine thread between its steps.

    Drops silent frontends, and migrates requests that find no blocks. Handles the ledger's
    deadlines if the asyncio thread hangs, which normally does so.

    leased: see `make_way`."""
    request_server.check_silent()
    ledger.tick_overdue()
    make_way(request_server, ledger, leased)


def make_way(
    request_server: RequestServer, ledger: Ledger, leased: int = 0, no_room_s: float = 5.0
) -> None:
    """Migrate requests that wait for blocks while blocks are in quarantine.

    The writer of these blocks may be stopped for ever, and vLLM would wait as long. Engine thread,
    before each step.

    leased: blocks whose reader is not proved quiet (`ReadLeases.unproved_blocks`).
    no_room_s: how long requests may wait for free blocks while no request runs."""
    ids = request_server.host.waiting_for_blocks(no_room_s)
    if ids and (blocks := ledger.quarantined_blocks + leased):
        logger.warning(
            "migrating %d requests: no room for them while %d blocks are in quarantine; "
            "continue or end the worker that is stopped",
            len(ids),
            blocks,
        )
        request_server.migrate(ids)
