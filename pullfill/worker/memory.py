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
from pullfill.engine.life import Life
from pullfill.runtime import log
from pullfill.transfer.owners import RankRegion, attach_ranks
from pullfill.worker.context import WorkerContext
from pullfill.worker.ports import MemoryLifetime

logger = log.get("worker.memory")

Told = Mapping[tuple[int, int], RankRegion]
"""What each rank, by (pipeline, tensor) rank, has told of its memory."""


def attach(
    context: WorkerContext, told: Told, kv_heads: int, attention: Attention = NO_MODEL
) -> RankRegion:
    """Map every rank's memory. Returns what the first one told. Raises IncompatibleError."""
    first = next(iter(told.values()))
    layers = sum(rank.num_layers for (_, tp), rank in told.items() if tp == 0)  # of all stages
    context.geometry = Geometry(layers, first.page_bytes, first.device, attention)
    context.ranks = attach_ranks(told, kv_heads)
    return first


class Copier(Protocol):
    """Who may still copy from or to the memory."""

    def join(self, timeout_s: float) -> bool:
        """Wait for the last copy. Returns False if it still runs."""


class KvMemory:
    """The KV memory of one engine (ports.py: `MemoryLifetime`).

    contexts: of all sides. copiers: all there are. They are closed before `quiet`."""

    def __init__(
        self, contexts: Sequence[WorkerContext], copiers: Sequence[Collection[Copier]] = ()
    ) -> None:
        self._contexts = contexts
        self._copiers = copiers

    def quiet(self, within_s: float) -> bool:
        until = time.monotonic() + within_s
        copiers = [copier for some in self._copiers for copier in some]
        quiet = all([copier.join(max(0.0, until - time.monotonic())) for copier in copiers])
        for context in self._contexts:
            close(context)
        return quiet


def close(context: WorkerContext) -> None:
    """Let nobody reach the memory any more, and remove the files."""
    # The mappings go with the process, because a copy may still run.
    if context.owner is not None:
        context.owner.close()
    if context.files is not None:
        context.files.close()


async def end(engine: Life[Any], memory: MemoryLifetime, copies_s: float = 3.0) -> None:
    """Stop everything that uses the KV memory, then free it. Nothing new may begin.

    copies_s: how long to wait for the last copies, all together."""
    await engine.halt()  # first: a running engine asks the fences for proofs
    if not await asyncio.to_thread(memory.quiet, copies_s):
        logger.warning("exiting while a KV copy still runs")
    await engine.stop()  # last: this frees the memory
