"""A job whose decode worker has decided otherwise is never computed, whenever it decides."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pullfill.queue.contract import Receipt
from pullfill.queue.urgency import Urgency
from tests.support.fakes import FakeClock
from tests.support.handoff_decode import DecodeHalf, Served
from tests.support.handoff_rig import Cluster, PrefillHalf, prompt, settled, until
from tests.support.nats import NatsServer


class SlowProducer:
    """A producer whose answers to publishes wait for `go`."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.go = asyncio.Event()
        self.go.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def publish(self, job_id: str, body: bytes, tokens: int, urgency: Urgency) -> Receipt:
        receipt: Receipt = await self._inner.publish(job_id, body, tokens, urgency)
        await self.go.wait()
        return receipt


def otherwise(how: str, decode: DecodeHalf, served: Served) -> None:
    """The decode worker decides that it needs no prefill worker."""
    if how == "abort":
        decode.abort(served)
    else:
        decode.pass_time(11.0)  # nobody has claimed the job: the prompt is computed here


async def stop_at(
    when: str, decode: DecodeHalf, prefill: PrefillHalf, claims: asyncio.Event
) -> Served:
    """Send a request, and let its job come so far. One job of another request waits before it."""
    producer: Any = decode.producer
    if when == "being published":
        producer.go.clear()
    served = decode.send(prompt(40, seed=2))
    (job_id,) = [e.job_id for e in decode.ledger._jobs.values()
                 if e.request_id == served.request.request_id]  # fmt: skip
    if when == "before the publish":
        return served
    await until(lambda: producer.depth().depth_jobs == 2)
    if when != "pulled":
        return served
    claims.clear()
    prefill.puller.start()
    await until(lambda: job_id in prefill.runner._jobs)
    return served


@pytest.mark.parametrize("how", ["abort", "claim timeout"])
@pytest.mark.parametrize("when", ["before the publish", "being published", "in a lane", "pulled"])
@pytest.mark.parametrize("queue", ["memory", "nats"])
async def test_it_is_not_computed(tmp_path: Path, when: str, how: str, queue: str) -> None:
    server = None
    if queue == "nats":
        server = NatsServer(tmp_path / "nats")
        await server.start()
    clock = FakeClock()
    claims = asyncio.Event()
    claims.set()
    async with Cluster(
        tmp_path, clock=clock, timeout_s=10.0, wrap=SlowProducer, server=server
    ) as cluster:
        decode = await cluster.decode()
        prefill = await cluster.prefill(pull=False)
        find = prefill.links.find

        async def late(instance_id: str) -> Any:
            await claims.wait()
            return await find(instance_id)

        computed: list[int] = []
        submit = prefill.engine.submit

        def noted(task: Any) -> None:
            computed.append(len(task.token_ids))
            submit(task)

        prefill.links.find = late  # type: ignore[method-assign]
        prefill.engine.submit = noted  # type: ignore[method-assign]
        first = decode.send(prompt(30))
        await until(lambda: decode.producer.depth().depth_jobs == 1)
        unwanted = await stop_at(when, decode, prefill, claims)
        otherwise(how, decode, unwanted)
        decode.producer.go.set()  # type: ignore[attr-defined]
        claims.set()
        if when != "pulled":
            prefill.puller.start()
        await settled(first, unwanted)
        last = decode.send(prompt(20, seed=3))
        await settled(last)
        assert decode.right(last)
        assert not unwanted.loaded
        # The clock has passed for the first job, too.
        assert computed == ([29, 19] if how == "abort" else [19])
        await cluster.check_clean()
    if server is not None:
        server.stop()
