"""Lets decode workers read this worker's KV blocks (`--kv-mode pull`), until that is revoked.

A task that is computed gets a fence over its own blocks, which goes to the decode worker with
`Ready`. After the attempt, however it ended, the fence is revoked. The blocks are freed only when
it is proved that nobody reads them. So a decode worker that is stopped during a read keeps them,
and one that is dead does not.

asyncio thread only.
"""

from __future__ import annotations

import asyncio

from pullfill.backoff import Backoff
from pullfill.errors import ConfigError, HandoffError
from pullfill.prefill_worker.task import PrefillTask
from pullfill.runtime import log
from pullfill.transfer.contract import OwnerFences
from pullfill.wire import FenceToken

logger = log.get("prefill_worker.read_grants")


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

    def stop(self, task: PrefillTask) -> None:
        """Revoke the fence, so that a read under way ends soon. Proves nothing."""
        self._revoked(task)

    async def let_go(self, task: PrefillTask) -> None:
        """Revoke the fence, wait for the proof, then let the engine free the blocks.

        Call it only for a cancelled task."""
        backoff = Backoff(0.002, 0.05)
        try:
            while not self._proved(task):
                pause_s = backoff.next()
                await asyncio.sleep(pause_s)
        except ConfigError as exc:
            logger.debug("job %s keeps its blocks: %s", task.job_id, exc)  # we are leaving
            return
        self._open.pop(task, None)
        task.transfer_worker.let_go(task)

    def _proved(self, task: PrefillTask) -> bool:
        """Revoke the fence. Returns whether it is proved that nobody reads; False on an OSError."""
        try:
            return self._revoked(task)
        except OSError:
            logger.exception(
                "job %s: its fence could not be checked; trying again soon", task.job_id,
                extra=log.ids(job_id=task.job_id, attempt=task.attempt),
            )  # fmt: skip
            return False

    def _revoked(self, task: PrefillTask) -> bool:
        fence = self._open.get(task)
        return fence is None or self._fences is None or self._fences.try_revoke(fence)
