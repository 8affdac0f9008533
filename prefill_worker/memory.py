"""The prefill worker's own KV cache: read from and written into by its transfer workers, and
read by decode workers that pull (readable_memory.py).

Life as in the decode worker: `prepare` takes the names before the engine is built, each rank's
process backs its cache with a file and tells where it is, `attach` maps every rank in the main
process. `end` waits for who still copies, removes the files, and ends the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping

from pullfill.engine.attention import NO_MODEL, Attention
from pullfill.engine.kv import Geometry
from pullfill.engine.thread import EngineThread
from pullfill.prefill_worker.context import PrefillContext
from pullfill.prefill_worker.transfer_worker import TransferWorker
from pullfill.runtime import log
from pullfill.transfer.shm import ranks
from pullfill.transfer.shm.files import RegionFiles

logger = log.get("prefill_worker.memory")

_COPIES_S = 3.0
"""For the transfer workers' last copies, all together."""


def prepare(context: PrefillContext) -> dict[str, str]:
    """Take the file names; returns what the ranks must know of them. Raises ConfigError."""
    context.files = RegionFiles(context.instance_id)
    return {"instance_id": context.instance_id, "directory": str(context.files.directory)}


def attach(
    context: PrefillContext,
    told: Mapping[tuple[int, int], ranks.RankRegion],
    kv_heads: int,
    attention: Attention = NO_MODEL,
) -> None:
    """Every rank has told its memory: map it. Raises IncompatibleError. Memory that no transport
    reaches makes a worker that gets no jobs."""
    first = next(iter(told.values()))
    layers = ranks.total_layers(told)
    context.geometry = Geometry(layers, first.page_bytes, first.device, attention)
    context.ranks = ranks.attach(told, kv_heads)
    if not context.ranks:
        why = first.why_not and f" ({first.why_not})"
        logger.warning(
            "no transport reaches KV memory on %s: no job will come%s", first.device, why
        )


async def end(
    engine: EngineThread, context: PrefillContext, transfer_workers: Iterable[TransferWorker]
) -> None:
    """End what still touches the KV memory, then the engine. transfer workers: all there are,
    closed."""
    await engine.halt()
    if not await asyncio.to_thread(_wait_for, list(transfer_workers)):
        logger.warning("leaving in the middle of a copy")
    await asyncio.to_thread(close, context)
    await engine.stop()


def _wait_for(transfer_workers: list[TransferWorker]) -> bool:
    until = time.monotonic() + _COPIES_S
    return all(
        [
            transfer_worker.join(max(0.0, until - time.monotonic()))
            for transfer_worker in transfer_workers
        ]
    )


def close(context: PrefillContext) -> None:
    """Nobody can read any more; remove the files. The mappings go with the process: a transfer
    worker may still be in a copy."""
    if context.owner is not None:
        context.owner.close()
    if context.files is not None:
        context.files.close()
