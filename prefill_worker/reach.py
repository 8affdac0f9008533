"""How this worker reaches a decode worker's KV memory: descriptors, transports, one session."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pullfill import log
from pullfill.errors import IncompatibleError
from pullfill.prefill_worker.context import PrefillContext
from pullfill.prefill_worker.mover import Mover
from pullfill.registry.directory import Directory
from pullfill.transfer.choose import choose
from pullfill.transfer.contract import PeerTransport
from pullfill.wire import Compat, WorkerRecord

logger = log.get("prefill_worker.reach")


async def open_mover(
    record: WorkerRecord,
    context: PrefillContext,
    directory: Directory,
    compat: Compat,
    transports: Sequence[PeerTransport],
) -> Mover:
    """Connect to a decode worker's KV memory by its descriptor from the registry, over the best of
    `transports`. Raises IncompatibleError, PeerUnavailable, BadMessage, TransferFailed."""
    memory = context.memory
    if memory is None:
        raise IncompatibleError("no transport reaches this worker's KV memory", field="device")
    descriptor = await directory.descriptor(record.instance_id, 0, expect=compat)
    transport, why_not = choose(descriptor, transports)
    for name, reason in why_not:
        logger.info("%s: not over %s: %s", record.instance_id, name, reason)
    session = await asyncio.to_thread(transport.connect, memory, descriptor)
    logger.info("writing to %s over %s", record.instance_id, transport.name)
    return Mover(session, record.instance_id, memory)
