"""The two sides of an elastic worker.

The decode side is made once and stays. While it rests no peer is connected to it, but its ledger
goes on, because blocks may still be in quarantine. The prefill side is made when it begins, and
closed when it rests, like that of a prefill worker that ends. Only its KV memory stays open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from pullfill.decode_worker import side
from pullfill.elastic.slack import LOOK_S, Slack
from pullfill.elastic.switch import Side
from pullfill.prefill_worker.side import PrefillService
from pullfill.runtime.lifecycle import end
from pullfill.worker.process import AsRole, Service


class DecodeSide(Side):
    """service_made: the decode service. It lives as long as the worker."""

    def __init__(self, as_role: AsRole, service_made: side.DecodeSide) -> None:
        super().__init__("decode", as_role)
        self._made = service_made

    async def open(self) -> Service:
        await self._made.resume()
        return self._made

    async def close(self) -> None:
        await self._made.rest()


class PrefillSide(Side):
    """make: connects to the queue and makes the service. What it opens, it pushes on the stack.

    slack: whether the decode side leaves time for jobs."""

    def __init__(
        self,
        as_role: AsRole,
        make: Callable[[AsyncExitStack], Awaitable[PrefillService]],
        slack: Slack,
    ) -> None:
        super().__init__("prefill", as_role)
        self._make = make
        self._slack = slack
        self._parts = AsyncExitStack()

    async def open(self) -> Service:
        service = await self._make(self._parts)
        looks = asyncio.create_task(self._yield(service), name="slack")
        self._parts.push_async_callback(end, looks)
        return service

    async def _yield(self, service: PrefillService) -> None:
        """Have the service pull only while there is slack."""
        while True:
            service.puller.pause("busy", self._slack.look())
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        await self._parts.aclose()
