"""Background tasks that write to etcd: writes are tried again, and all tasks end together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from pullfill.errors import PullfillError
from pullfill.registry.client import EtcdClient
from pullfill.runtime import log
from pullfill.runtime.lifecycle import end

_log = log.get("registry.background")

RETRY_S = 1.0


class Background:
    """Owns its tasks until `close`. Single event loop."""

    def __init__(self, client: EtcdClient) -> None:
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start a task. Its failure is logged."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def close(self) -> None:
        """End all tasks. Idempotent."""
        await end(*self._tasks)

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        """Write a key that lives for `ttl_s`, on a lease of its own.

        While etcd does not answer, try again, until `ttl_s` have passed."""
        end = time.monotonic() + ttl_s
        while (left_s := end - time.monotonic()) > 1:
            try:
                lease, _, _ = await self._client.grant_lease(int(left_s))
                await self._client.put(key, value, lease)
                return
            except PullfillError as exc:
                _log.debug("%s is not stored yet: %s", key, exc)
                await asyncio.sleep(RETRY_S)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s stopped: %s", task.get_name(), error)
