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
from pullfill.errors import ConfigError
from pullfill.prefill_worker.task import PrefillTask
from pullfill.runtime import log
from pullfill.transfer.shm.fence import ShmFences
from pullfill.wire import FenceToken

logger = log.get("prefill_worker.read_grants")


class ReadGrants:
    """See the module. fences: over our own memory."""

    def __init__(self, fences: ShmFences) -> None:
        self._fences = fences
        self._open: dict[PrefillTask, FenceToken] = {}

    @property
    def kept_blocks(self) -> int:
        """Blocks that some decode worker may read."""
        return sum(len(task.kept) for task in self._open)

    def open(self, task: PrefillTask) -> FenceToken:
        """Return the right to read what the task has computed.

        Raises OverloadedError."""
        blocks = task.kept_blocks
        fence = self._open[task] = self._fences.open(blocks, len(blocks))  # to be read only
        return fence

    def revoke(self, task: PrefillTask) -> bool:
        """Revoke the fence, so that a read under way ends soon.

        Returns whether it is proved that nobody reads the blocks any more."""
        fence = self._open.get(task)
        return fence is None or self._fences.try_revoke(fence)

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
