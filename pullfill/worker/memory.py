"""A worker's KV cache as memory that peers can reach.

Life: each rank's process backs its cache with a file and tells where it is (connector.py) →
`attach` maps every rank in the main process, before the engine takes a request → `end` waits for
who still copies, removes the files, and ends the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from pullfill.engine.kv import NO_MODEL, Attention, Geometry
from pullfill.engine.thread import EngineThread
from pullfill.runtime import log
from pullfill.transfer.owners import RankRegion, attach_ranks, total_layers
from pullfill.worker.context import WorkerContext

logger = log.get("worker.memory")

Told = Mapping[tuple[int, int], RankRegion]
"""What each rank, by (pipeline, tensor) rank, has told of its memory."""


def attach(
    context: WorkerContext, told: Told, kv_heads: int, attention: Attention = NO_MODEL
) -> RankRegion:
    """Map every rank's memory. Returns what the first one told. Raises IncompatibleError."""
    first = next(iter(told.values()))
    layers = total_layers(told)
    context.geometry = Geometry(layers, first.page_bytes, first.device, attention)
    context.ranks = attach_ranks(told, kv_heads)
    return first


class Copier(Protocol):
    """Who may still copy from or to the memory."""

    def join(self, timeout_s: float) -> bool:
        """Wait for the last copy. Returns False if it still runs."""


async def end(
    engine: EngineThread[Any],
    contexts: Sequence[WorkerContext],
    copiers: Sequence[Collection[Copier]] = (),
    copies_s: float = 3.0,
) -> None:
    """Stop everything that uses the KV memory, then free it. Nothing new may begin.

    contexts: of all sides. copiers: all there are, closed.
    copies_s: how long to wait for the last copies, all together."""
    await engine.halt()  # first: a running engine asks the fences for proofs
    if not await asyncio.to_thread(_join, copiers, copies_s):
        logger.warning("exiting while a KV copy still runs")
    for context in contexts:
        await asyncio.to_thread(close, context)
    await engine.stop()  # last: this frees the memory


def _join(copiers: Sequence[Collection[Copier]], copies_s: float) -> bool:
    until, all_ = time.monotonic() + copies_s, [one for some in copiers for one in some]
    return all([copier.join(max(0.0, until - time.monotonic())) for copier in all_])


def close(context: WorkerContext) -> None:
    """Let nobody reach the memory any more, and remove the files."""
    # The mappings go with the process, because a copy may still run.
    if context.owner is not None:
        context.owner.close()
    if context.files is not None:
        context.files.close()
