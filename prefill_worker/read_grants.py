"""Lets decode workers read this worker's own KV blocks (`--kv-mode pull`), until that is revoked.

The memory is always opened, because a decode worker says its mode only with a grant. Nobody can
read it without one of our fences. A task that is computed gets a fence over its own blocks, which
goes to the decode worker with `Ready`. After the attempt, however it ended, the fence is revoked.
The blocks are freed only when it is proved that nobody reads them. So a decode worker that is
stopped during a read keeps them, and one that is dead does not.

asyncio thread only.
"""

from __future__ import annotations

import asyncio

from pullfill.backoff import Backoff
from pullfill.errors import ConfigError, HandoffError
from pullfill.ids import new_incarnation
from pullfill.net.security import ClusterKey
from pullfill.prefill_worker.task import PrefillTask
from pullfill.runtime import log
from pullfill.transfer.connect import backends, pulled_over
from pullfill.transfer.contract import OwnerFences, proved
from pullfill.transfer.owners import Owner
from pullfill.wire import FenceToken, RegionDescriptor
from pullfill.worker.context import WorkerContext

logger = log.get("prefill_worker.read_grants")


def open_region(
    context: WorkerContext,
    *,
    host: str,
    port: int = 0,
    advertise: str | None = None,
    transports: frozenset[str] | None,
    key: ClusterKey | None,
) -> tuple[RegionDescriptor, ...]:
    """Open our memory, and describe that of each rank, for `Hello`. Empty: nobody can read it.

    Sets `context.owner`, which the worker closes when no session can be open. Raises ConfigError.

    host, port: where to listen if `tcp` is among the transports. Port 0: any.
    advertise: the address to publish instead."""
    if not context.ranks or context.files is None:
        return ()
    names = pulled_over(context.memories[0], transports)
    owner = Owner(
        context.files,
        context.ranks,
        new_incarnation(),  # of this process
        instance_id=context.instance_id,
        kinds=backends(names, context.memories[0]),
        key=key,
        offered=names,
    )
    context.opened(owner)
    owner.listen(host, port, advertise)
    return owner.describe()


class ReadGrants:
    """See the module. fences: over our own memory. None: nobody can read it."""

    def __init__(self, fences: OwnerFences | None) -> None:
        self._fences = fences
        self._open: dict[PrefillTask, FenceToken] = {}

    @property
    def kept_blocks(self) -> int:
        """Blocks that some decode worker may read."""
        return sum(len(task.kept) for task in self._open)

    def open(self, task: PrefillTask) -> FenceToken:
        """Return the right to read what the task has computed.

        Raises HandoffError, OverloadedError."""
        if self._fences is None:
            raise HandoffError("told to keep its blocks, but nobody can read this worker's memory")
        blocks = task.kept_blocks
        fence = self._open[task] = self._fences.open(blocks, len(blocks))  # to be read only
        return fence

    def revoke(self, task: PrefillTask) -> bool:
        """Revoke the fence, so that a read under way ends soon.

        Returns whether it is proved that nobody reads the blocks any more."""
        fence = self._open.get(task)
        return fence is None or self._fences is None or proved(self._fences, fence)

    async def let_go(self, task: PrefillTask) -> None:
        """Revoke the fence, wait for the proof, then let the engine free the blocks.

        Call it only for a cancelled task."""
        pauses = Backoff(0.002, 0.05)
        try:
            while not self.revoke(task):  # noqa: ASYNC110 (only asking tells)
                await asyncio.sleep(pauses.next())
        except ConfigError as exc:
            logger.debug("job %s keeps its blocks: %s", task.job_id, exc)  # we are leaving
            return
        self._open.pop(task, None)
        task.transfer_worker.let_go(task)
