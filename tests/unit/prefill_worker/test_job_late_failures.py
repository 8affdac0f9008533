"""What a prefill worker does when something goes wrong in the worst moment: no grant is kept."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from pullfill.prefill_worker.puller import Puller
from pullfill.prefill_worker.transfer_worker import Credits
from pullfill.queue.nats_connection import NotSent
from pullfill.wire import FenceToken, Grant

GRANT = Grant(
    rid=1, job_id="j", attempt=1, incarnation="i", deadline_s=30, job_digest=b"",
    fence=FenceToken(slot=0, epoch=0),
)  # fmt: skip


async def test_what_cannot_be_given_back_does_not_end_the_pulling() -> None:
    pulls = asyncio.Queue[None]()

    async def nak(_: float = 0.0) -> None:
        raise NotSent("no connection to NATS")

    async def pull(*_: float, **__: bool) -> list[Any]:
        pulls.put_nowait(None)
        if pulls.qsize() > 1:
            await asyncio.sleep(100)
        puller.pause(True)
        asyncio.get_running_loop().call_later(0.01, puller.pause, False)
        return [SimpleNamespace(nak=nak, ack_subject="ack")]

    async def drain() -> None: ...

    consumer: Any = SimpleNamespace(pull=pull, drain=drain)
    runner: Any = SimpleNamespace(in_flight_tokens=0, in_flight=0, waiting=0)
    puller = Puller(consumer, runner, budget_tokens=10, max_jobs=2, credits=Credits(1))
    puller.start()
    try:
        async with asyncio.timeout(10):
            while pulls.qsize() < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
    finally:
        await puller.stop()
