"""A worker's KV cache as memory that peers can reach.

Life: each rank's process backs its cache with a file and tells where it is (connector.py) →
`attach` maps every rank in the main process, before the engine takes a request → `open_to_peers` →
`end` waits until no copy runs, removes the files, and ends the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from pullfill.engine.groups import Groups
from pullfill.engine.kv import Geometry
from pullfill.engine.life import Life
from pullfill.errors import ConfigError
from pullfill.ids import new_incarnation
from pullfill.net.security import ClusterKey
from pullfill.options import WorkerOptions
from pullfill.runtime import log
from pullfill.transfer.connect import backends, pulled_over
from pullfill.transfer.owners import Owner, RankRegion, attach_ranks
from pullfill.worker.context import WorkerContext

logger = log.get("worker.memory")


def attach(
    context: WorkerContext,
    told: Mapping[tuple[int, int], RankRegion],
    kv_heads: int,
    stored: tuple[str, str],
    groups: Groups,
) -> None:
    """Map every rank's memory. Raises IncompatibleError.

    told: what each rank, by (pipeline, tensor) rank, has told of its memory.
    stored: of `kv.join_attention`."""
    first = next(iter(told.values()))
    context.why_not = first.why_not
    layers = sum(rank.num_layers for (_, tp), rank in told.items() if tp == 0)  # of all stages
    context.geometry = Geometry(layers, first.page_bytes, *stored, groups)
    context.ranks = attach_ranks(told, kv_heads)


def open_to_peers(
    context: WorkerContext, options: WorkerOptions, key: ClusterKey | None, *, decodes: bool
) -> None:
    """Let peers reach the memory of every rank, over each transport that works here.

    Sets `context.owner`; `close` closes it. If no transport reaches the memory, the owner is closed
    at once. Such a worker sends no jobs and gets none. Raises ConfigError if the port is taken, or
    if the user has named transports and none of them reaches the memory of a worker that decodes.

    decodes: whether prefill workers write to the memory. If not, decode workers read it, and only
    with `--kv-mode pull`. Transports that keep something open for each peer are not offered then.
    """
    memories, offered = context.memories, options.transports
    if memories and not decodes:
        offered = pulled_over(memories[0], offered)
    owner = context.owner = Owner(
        context.files,
        context.ranks,
        new_incarnation(),
        instance_id=context.instance_id,
        kinds=backends(offered, memories[0], options.host) if memories else {},
        key=key,
        offered=offered,
    )
    owner.listen(options.host, options.kv_port, options.advertise_kv)
    if names := owner.transports:
        logger.info(
            "KV cache shared over %s: %d blocks of %d bytes on %d ranks", ", ".join(names),
            memories[0].layout.num_blocks, sum(one.layout.block_bytes for one in memories),
            len(memories),
        )  # fmt: skip
        return
    if memories and not decodes:
        return  # it writes KV all the same
    owner.close()
    if memories and options.transports is not None:
        raise ConfigError(
            f"--transports {','.join(sorted(options.transports))}: none of them reaches "
            "this worker's KV memory (pullfill doctor says why)"
        )
    logger.warning(
        "no transport reaches this worker's KV memory: it sends no prefill jobs and gets none%s",
        context.why_not and f" ({context.why_not})",
    )


class Copier(Protocol):
    """Who may still copy from or to the memory."""

    def join(self, timeout_s: float) -> bool:
        """Wait for the last copy. Returns False if it still runs."""


def close(context: WorkerContext) -> None:
    """Let nobody reach the memory any more, and remove the files."""
    # The mappings go with the process, because a copy may still run.
    (context.owner or context.files).close()  # the owner closes the files, too


async def end(
    engine: Life[Any],
    context: WorkerContext,
    copiers: Sequence[Collection[Copier]],
    copies_s: float = 3.0,
) -> None:
    """Stop everything that uses the KV memory, then free it. Nothing new may begin.

    copiers: of all sides. They are closed.
    copies_s: how long to wait for the last copies, all together."""

    def quiet() -> bool:
        until = time.monotonic() + copies_s
        every = [copier for some in copiers for copier in some]
        over = all([copier.join(max(0.0, until - time.monotonic())) for copier in every])
        close(context)
        return over

    await engine.halt()  # first: a running engine asks the fences for proofs
    if not await asyncio.to_thread(quiet):
        logger.warning("exiting while a KV copy still runs")
    await engine.stop()  # last: this frees the memory
