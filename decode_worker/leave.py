"""How requests leave a decode worker before they end: it hands them back to their frontends, which
continue them elsewhere. When the worker itself leaves, and when there is no room for them. And how
its KV memory is left.

Asyncio thread, but for `look`, `make_way` and `last_words`; the engine's own part runs on the
engine thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from pullfill import log
from pullfill.decode_worker.ledger import Ledger
from pullfill.decode_worker.shim import FrontendShim
from pullfill.engine.host import EngineHost
from pullfill.engine.thread import EngineThread
from pullfill.transfer.contract import Owner

logger = log.get("decode_worker.leave")

NO_ROOM_S = 5.0
"""How long requests may wait for blocks, with none running, while blocks are in quarantine."""
_HAND_BACK_S = 1.0
"""How long an engine that must stop may take to hand its requests back."""
_FLUSH_S = 0.1
"""Between handing requests back and closing the socket they go out on."""


async def idle(engine: EngineThread, shim: FrontendShim, ledger: Ledger) -> None:
    """Until no request is left, here or in a job, twice in a row: outputs are sent by then. Blocks
    in quarantine are not waited for: this process ends, and nobody else ever gets their memory. A
    writer that wakes up later writes into its own mapping of a file that has no name any more."""
    quiet = 0
    while quiet < 2 and not engine.dead.is_set():
        busy = shim.active_requests or ledger.waiting_requests
        quiet = 0 if busy else quiet + 1
        await asyncio.sleep(0.05)


async def hand_back(host: EngineHost, shim: FrontendShim) -> None:
    """Let the frontends continue elsewhere what does not end here. An engine that is stuck cannot;
    they notice when this process is gone."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def work(_: Any) -> None:
        shim.hand_back()
        loop.call_soon_threadsafe(done.set)

    host.submit(work)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_HAND_BACK_S):
            await done.wait()
            await asyncio.sleep(_FLUSH_S)


def last_words(shim: FrontendShim | None, untouched: set[str]) -> None:
    """A step has raised, so this worker ends (engine thread). untouched: requests in vLLM's queue
    that were not in this step. They did not cause it and go back, so that no frontend suspects
    them. It suspects the others when it notices that this process is gone."""
    assert shim is not None
    shim.start_drain()
    shim.receive()  # what has arrived and was not read goes back, too
    shim.hand_back(untouched | shim.coming())
    time.sleep(_FLUSH_S)


async def end_memory(engine: EngineThread, owner: Owner | None) -> None:
    """End what still touches the KV memory, then the engine. The control server is stopped: nobody
    reads or checks. The engine asks the fences for proofs as long as it runs, so it halts before
    they close; its memory outlives the threads that receive into it."""
    await engine.halt()
    if owner is not None:
        await asyncio.to_thread(owner.close)
    await engine.stop()


def look(shim: FrontendShim, ledger: Ledger) -> None:
    """What the engine thread does between steps, now and then: let go of frontends that are silent
    and of requests that have no room, and be the ledger's clock if the asyncio thread hangs."""
    shim.check_silent()
    ledger.tick_overdue()
    make_way(shim, ledger)


def make_way(shim: FrontendShim, ledger: Ledger) -> None:
    """Hand back what has no room because of blocks in quarantine: their writer may be stopped for
    ever, and vLLM would wait for as long (engine thread, before each step)."""
    ids = shim.host.waiting_for_blocks(NO_ROOM_S)
    if ids and (blocks := ledger.quarantined_blocks):
        logger.warning(
            "handing back %d requests: no room for them while %d blocks are in quarantine; "
            "continue or end the prefill worker that is stopped",
            len(ids),
            blocks,
        )
        shim.hand_back(ids)
