"""The prefill worker's own KV cache: read from and written into by its transfer workers, and read
by decode workers that pull (readable_memory.py). Its life is that of worker/memory.py.
"""

from __future__ import annotations

from pullfill.engine.attention import NO_MODEL, Attention
from pullfill.prefill_worker.context import PrefillContext
from pullfill.runtime import log
from pullfill.worker import memory

logger = log.get("prefill_worker.memory")


def attach(
    context: PrefillContext, told: memory.Told, kv_heads: int, attention: Attention = NO_MODEL
) -> None:
    """Every rank has told its memory: map it. Raises IncompatibleError. Memory that no transport
    reaches makes a worker that gets no jobs."""
    first = memory.attach(context, told, kv_heads, attention)
    if not context.ranks:
        why = first.why_not and f" ({first.why_not})"
        logger.warning(
            "no transport reaches KV memory on %s: no job will come%s", first.device, why
        )
