"""Connects to a decode worker's KV memory: loads descriptors, chooses transports, opens sessions.

Each rank of the decode worker has a region of its own, and so has each rank here. The transfer
worker uses one session over all of them (`transfer/connect.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pullfill.errors import BadMessage, IncompatibleError, PeerUnavailable
from pullfill.prefill_worker.context import PrefillContext
from pullfill.prefill_worker.credits import Credits
from pullfill.prefill_worker.transfer_worker import TransferWorker
from pullfill.registry.directory import Directory
from pullfill.runtime import log
from pullfill.runtime.lanes import Lane
from pullfill.transfer.connect import connect, why_not_better
from pullfill.transfer.contract import PeerTransport
from pullfill.wire import Compat, WorkerRecord

logger = log.get("prefill_worker.reach")

MAX_RANKS = 1024
"""More than any engine has. A descriptor that says more is refused, so etcd is asked no further."""
NOTHING: Mapping[str, str] = MappingProxyType({})


async def open_transfer_worker(
    record: WorkerRecord,
    context: PrefillContext,
    directory: Directory,
    compat: Compat,
    transports: Sequence[PeerTransport],
    credits: Credits | None = None,
    absent: Mapping[str, str] = NOTHING,
) -> TransferWorker:
    """Connect to a decode worker's KV memory, each rank over the best of `transports`.

    Raises IncompatibleError, TransferFailed and PeerUnavailable. The last also for descriptors or
    answers that cannot be read: those are the decode worker's fault, never that of a job.

    absent: why other transports are not among `transports`, for people."""
    try:
        return await _open(record, context, directory, compat, transports, credits, absent)
    except BadMessage as exc:
        raise PeerUnavailable(f"cannot connect to the KV memory: {exc}") from exc


async def _open(
    record: WorkerRecord,
    context: PrefillContext,
    directory: Directory,
    compat: Compat,
    transports: Sequence[PeerTransport],
    credits: Credits | None,
    absent: Mapping[str, str],
) -> TransferWorker:
    memories = context.memories
    if not memories:
        raise IncompatibleError("no transport reaches this worker's KV memory", field="device")
    name = record.instance_id
    first = await directory.descriptor(name, 0, expect=compat)
    if first.world_size > MAX_RANKS:
        raise BadMessage(f"{name} says it has {first.world_size} ranks")
    others = [
        await directory.descriptor(name, rank, expect=compat) for rank in range(1, first.world_size)
    ]
    # On a thread of its own: it may wait for a worker that does not answer.
    loop, lane = asyncio.get_running_loop(), Lane()
    better = await loop.run_in_executor(lane, why_not_better, first, transports, absent)
    session = await loop.run_in_executor(lane, connect, memories, [first, *others], transports)
    logger.info("writing to %s over %s", name, session.transport)
    account = credits.open(name) if credits is not None else None
    return TransferWorker(session, name, memories, account, better)
