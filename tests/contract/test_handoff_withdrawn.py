"""A job that its decode worker withdraws is never computed, and one that the queue loses is local.

A decode worker may withdraw a job at any time. The queue may lose one in any way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from pullfill.queue.contract import Receipt, Urgency
from pullfill.queue.jetstream import JetStreamConsumer
from pullfill.queue.streams import Names
from tests.support.fakes import FakeClock
from tests.support.handoff_rig import (
    Cluster,
    DecodeHalf,
    Make,
    PrefillHalf,
    Served,
    prompt,
    settled,
)
from tests.support.waiting import soon


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
    await soon(lambda: producer.depth().depth_jobs == 2)
    if when != "pulled":
        return served
    claims.clear()
    prefill.puller.start()
    await soon(lambda: job_id in prefill.puller._jobs)
    return served


@pytest.mark.parametrize("how", ["abort", "claim timeout"])
@pytest.mark.parametrize("when", ["before the publish", "being published", "queued", "pulled"])
@pytest.mark.essential
async def test_it_is_not_computed(make: Make, when: str, how: str) -> None:
    clock = FakeClock()
    claims = asyncio.Event()
    claims.set()
    async with make(clock=clock, timeout_s=10.0, wrap=SlowProducer) as cluster:
        decode = await cluster.decode()
        prefill = await cluster.prefill(pull=False)
        find = prefill.links.find

        async def late(instance_id: str, **how: bool) -> Any:
            await claims.wait()
            return await find(instance_id, **how)

        computed: list[int] = []
        submit = prefill.engine.submit

        def noted(task: Any) -> None:
            computed.append(len(task.token_ids))
            submit(task)

        prefill.links.find = late  # type: ignore[method-assign]
        prefill.engine.submit = noted  # type: ignore[method-assign]
        first = decode.send(prompt(30))
        await soon(lambda: decode.producer.depth().depth_jobs == 1)
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


# ------------------------------------------------------------------ the queue loses it


async def lose(how: str, cluster: Cluster, consumer: JetStreamConsumer) -> None:
    """Let the message of the only job disappear, after it was published."""
    names = Names(cluster.config.namespace, cluster.config.compat_hash)
    (producer,) = [decode.producer for decode in cluster.decodes.values()]
    connection: Any = producer.connection  # type: ignore[attr-defined]
    if how == "purge":
        assert (await connection.api(f"STREAM.PURGE.{names.stream}"))["purged"] == 1
    elif how == "delete":
        await connection.api(f"STREAM.DELETE.{names.stream}")
    else:
        for _ in range(cluster.config.max_deliver if how == "max_deliver" else 1):
            delivery = await consumer.pull(30.0)
            await (delivery.term("it is poison") if how == "term" else delivery.nak())
        assert not await consumer.pull(0.2)


@pytest.mark.parametrize("how", ["purge", "delete", "term", "max_deliver"])
async def test_a_job_whose_message_is_gone_is_local(
    make: Make, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Within a second, not after the claim timeout of 10 s. It is told, and the next one is remote.

    An older job, which a prefill worker holds, stays where it is."""
    caplog.set_level(logging.WARNING)
    async with make() as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(pull=False)
        consumer = await JetStreamConsumer.connect(cluster.server.url, cluster.config)
        beside = how in ("term", "max_deliver")
        if beside:
            older = decode.send(prompt(30))
            await soon(lambda: decode.producer.depth().depth_jobs == 1)
            held = await consumer.pull(30.0)
        served = decode.send(prompt(20, seed=2))
        await soon(lambda: decode.producer.depth().depth_jobs == 1 + beside)
        await lose(how, cluster, consumer)
        began = time.monotonic()
        await settled(served)
        assert time.monotonic() - began < 5.0
        assert served.loaded is False
        trace = decode.traces.finish(served.request.request_id)
        assert trace is not None
        assert trace.fallback == "job_gone"
        assert "1 jobs are gone from the queue" in caplog.text
        if beside:
            assert older.loaded is None
            await held.nak()
        await consumer.close()
        prefill.puller.start()
        await soon(lambda: decode.producer.available)
        last = decode.send(prompt(20, seed=3))
        await settled(last)
        assert decode.right(last)
        await cluster.check_clean()
