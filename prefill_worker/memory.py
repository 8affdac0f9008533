"""The prefill worker's own KV cache, as its transfer workers use it.

Decode workers that pull read it too (readable_memory.py). worker/memory.py has its life.
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
    """Map the memory of every rank. Raises IncompatibleError.

    If no transport reaches the memory, the worker gets no jobs.

    told: what each rank has told of its memory."""
    first = memory.attach(context, told, kv_heads, attention)
    if not context.ranks:
        why = first.why_not and f" ({first.why_not})"
        logger.warning(
            "no transport reaches KV memory on %s: this worker gets no jobs%s", first.device, why
        )
