"""The prefill worker's own KV cache: read from and written into by its movers, and
read by decode workers that pull (region.py).

Life as in the decode worker: `prepare` takes the names before the engine is built, each rank's
process backs its cache with a file and tells where it is, `attach` maps every rank in the main
process. `close` removes the files.
"""

from __future__ import annotations

from collections.abc import Mapping

from pullfill import log
from pullfill.engine.kv import Geometry
from pullfill.prefill_worker.context import PrefillContext
from pullfill.transfer.shm import ranks
from pullfill.transfer.shm.files import RegionFiles

logger = log.get("prefill_worker.memory")


def prepare(context: PrefillContext) -> dict[str, str]:
    """Take the file names; returns what the ranks must know of them. Raises ConfigError."""
    context.files = RegionFiles(context.instance_id)
    return {"instance_id": context.instance_id, "directory": str(context.files.directory)}


def attach(
    context: PrefillContext, told: Mapping[tuple[int, int], ranks.RankRegion], kv_heads: int
) -> None:
    """Every rank has told its memory: map it. Raises IncompatibleError. Memory that no transport
    reaches makes a worker that gets no jobs."""
    first = next(iter(told.values()))
    context.geometry = Geometry(ranks.total_layers(told), first.page_bytes, first.device)
    context.ranks = ranks.attach(told, kv_heads)
    if not context.ranks:
        why = first.why_not and f" ({first.why_not})"
        logger.warning(
            "no transport reaches KV memory on %s: no job will come%s", first.device, why
        )


def close(context: PrefillContext) -> None:
    """Remove the files; nobody reads any more. The mappings go with the process: a mover may still
    be in a copy."""
    if context.owner is not None:
        context.owner.close()
    if context.files is not None:
        context.files.close()
