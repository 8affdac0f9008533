"""Jobs on their way from the engine thread to the queue: each is published, the loop woken once."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from pullfill.decode_worker.context import OpenedJob
from pullfill.decode_worker.ledger import Entry, Ledger, Settle
from pullfill.decode_worker.publisher import Publisher
from pullfill.engine import features
from pullfill.errors import Outcome, QueueFull
from pullfill.queue.contract import Receipt, Urgency
from pullfill.testing.loopback import LoopbackFences
from tests.support import said


class Queue:
    """Stores what is published."""

    def __init__(self) -> None:
        self.stored: list[str] = []
        self.urgencies: list[Urgency] = []
        self.claims: list[str] = []
        self.commits: list[str] = []

    def claimed(self, receipt: Receipt) -> None:
        self.claims.append(receipt.job_id)

    def committed(self, receipt: Receipt) -> None:
        self.commits.append(receipt.job_id)

    async def publish(self, job_id: str, body: bytes, tokens: int, urgency: Urgency) -> Receipt:
        self.stored.append(job_id)
        self.urgencies.append(urgency)
        return Receipt(job_id, len(self.stored), False, "s")


def opened(job_id: str) -> OpenedJob:
    return OpenedJob(
        job_id=job_id, request_id=f"r-{job_id}", token_ids=[1, 2, 3], hit_tokens=0, blocks=(1,),
        read_from=(0,), kept_from=(0,), cache_salt=None, priority=0, timeout_s=5.0,
        claim_timeout_s=5.0, adapter=None,
    )  # fmt: skip


def publisher_of(loop: Any, queue: Any, ledger: Ledger) -> Publisher:
    return Publisher(loop, queue, ledger, instance_id="d", compat_hash="c", send=lambda *_: None)


async def test_jobs_of_one_step_wake_the_loop_once_and_are_all_published() -> None:
    loop, queue = asyncio.get_running_loop(), Queue()
    ledger = Ledger(LoopbackFences(8, 8), incarnation="i")
    woken: list[Any] = []

    class Loop:
        def call_soon_threadsafe(self, call: Any) -> None:
            woken.append(call)
            loop.call_soon_threadsafe(call)

        create_task = staticmethod(loop.create_task)

    publisher = publisher_of(Loop(), queue, ledger)

    def step(jobs: list[OpenedJob]) -> None:
        for job in jobs:
            ledger.open(Entry(job.job_id, job.request_id, job.blocks, 0, timeout_s=5.0))
            publisher.submit(job)

    for number in range(2):
        jobs = [opened(f"j{number}.{index}") for index in range(3)]
        thread = threading.Thread(target=step, args=(jobs,))
        thread.start()
        thread.join()  # the loop did not run meanwhile
        async with asyncio.timeout(5.0):
            while len(queue.stored) < 3 * (number + 1):  # noqa: ASYNC110 - nothing to wait on
                await asyncio.sleep(0)
    assert len(woken) == 2
    assert queue.stored == [f"j{number}.{index}" for number in range(2) for index in range(3)]


async def test_a_job_is_published_with_its_urgency_and_claimed_if_the_claim_came_first() -> None:
    """Otherwise the queue would believe that the job waits, and put the next one into a lane."""
    loop, queue = asyncio.get_running_loop(), Queue()
    ledger = Ledger(LoopbackFences(8, 8), incarnation="i")
    publisher = publisher_of(loop, queue, ledger)
    for name, urgency in (("waits", Urgency.LOOSE), ("taken", Urgency.TIGHT)):
        ledger.open(Entry(name, f"r-{name}", (1,), first_target=0, timeout_s=5.0))
        publisher.submit(replace(opened(name), urgency=urgency))
    said.grant(ledger, "taken", "i", "writer")
    async with asyncio.timeout(5.0):
        while len(queue.claims) < 1:  # noqa: ASYNC110 - nothing to wait on
            await asyncio.sleep(0)
    assert queue.urgencies == [Urgency.LOOSE, Urgency.TIGHT]
    assert queue.claims == ["taken"]


async def test_a_job_that_was_committed_before_the_queue_has_answered_is_not_counted() -> None:
    loop, queue = asyncio.get_running_loop(), Queue()
    ledger = Ledger(LoopbackFences(8, 8), incarnation="i")
    publisher = publisher_of(loop, queue, ledger)
    real = queue.publish

    async def publish(job_id: str, *args: Any) -> Receipt:
        receipt = await real(job_id, *args)
        granted = said.grant(ledger, job_id, "i", "writer").grant
        assert granted is not None
        if job_id == "done":
            assert said.commit(ledger, job_id, granted.attempt, "i", "writer", 1) is None
        return receipt

    queue.publish = publish  # type: ignore[method-assign]
    for name in ("done", "claimed"):
        ledger.open(Entry(name, f"r-{name}", (1,), first_target=0, timeout_s=9.0))
        publisher.submit(opened(name))
    async with asyncio.timeout(5.0):
        while len(queue.claims) < 2:  # noqa: ASYNC110 - nothing to wait on
            await asyncio.sleep(0)
    assert queue.commits == ["done"]


@pytest.mark.parametrize(
    ("retryable", "outcome"), [(True, Outcome.QUEUE_FULL), (False, Outcome.PUBLISH_FAILED)]
)
async def test_a_job_that_nats_does_not_take_is_told_but_for_a_full_queue(
    retryable: bool, outcome: Outcome, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(LoopbackFences(8, 8), incarnation="i")
    queue = Queue()
    refusal = QueueFull("too large")
    refusal.retryable = retryable

    async def refuse(*_: Any) -> Receipt:
        raise refusal

    queue.publish = refuse  # type: ignore[method-assign]
    ledger.open(Entry("j", "r-j", (1,), first_target=0, timeout_s=60.0))
    publisher_of(asyncio.get_running_loop(), queue, ledger).submit(opened("j"))
    async with asyncio.timeout(5.0):
        while not ledger.has_events:  # noqa: ASYNC110 - nothing to wait on
            await asyncio.sleep(0)
    assert [e.outcome for e in ledger.take_events() if isinstance(e, Settle)] == [outcome]
    assert len(caplog.records) == (not retryable)


async def test_inputs_are_encoded_once_and_not_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, bool]] = []

    def seen(name: str, result: Any) -> Any:
        def call(_: Any) -> Any:
            calls.append((name, threading.current_thread() is threading.main_thread()))
            return result

        return call

    monkeypatch.setattr(features, "encode", seen("encode", b"inputs"))
    monkeypatch.setattr(features, "digest", seen("digest", "of inputs"))
    queue, ledger = Queue(), Ledger(LoopbackFences(8, 8), incarnation="i")
    publisher = publisher_of(asyncio.get_running_loop(), queue, ledger)
    ledger.open(Entry("j", "r-j", (1,), first_target=0, timeout_s=60.0))
    publisher.submit(replace(opened("j"), features=["an image"]))
    async with asyncio.timeout(5.0):
        while not queue.stored or publisher._tasks:  # noqa: ASYNC110 - nothing to wait on
            await asyncio.sleep(0)
    for writer in "ab":
        grant = said.grant(ledger, "j", "i", writer).grant
        assert grant is not None
        assert grant.features == b"inputs"
        said.gave_up(ledger, "j", grant.attempt, "i", writer, "cause", retry=True)
    assert calls == [("encode", False), ("digest", False)]
