"""How a pulled job is settled, and who is told, when its decode worker is what goes wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pullfill.errors import BadMessage, ClaimRefused, PeerUnavailable
from pullfill.ids import job_digest
from pullfill.prefill_worker.budget import CLAIM_S
from pullfill.prefill_worker.decode_links import DecodeLink
from pullfill.prefill_worker.jobs import JobRunner
from pullfill.prefill_worker.reach import OutOfReach
from pullfill.wire import (
    CommitReply,
    DrainAck,
    FenceToken,
    GiveUp,
    Grant,
    PrefillJob,
    RefuseReason,
    Revoke,
    encode,
    u32,
)
from tests.support.workers import eventually

JOB = PrefillJob(
    job_id="j", incarnation="i", decode_instance="d", request_id="r",
    compat="c", token_ids=u32.pack([1, 2, 3, 4]), hit_tokens=0, block_ids=u32.pack([0]),
    timeout_s=60.0,
)  # fmt: skip
BODY = encode(JOB)
Reach = Callable[[], Coroutine[Any, Any, Any]]


class Delivered:
    """A `Delivery`; `verbs`: how it was settled."""

    job_id, body, tokens, ack_subject = "j", BODY, 4, ""

    def __init__(self, number: int = 1) -> None:
        self.number = number
        self.verbs: list[str] = []
        self.delay_s = 0.0

    async def ack(self) -> None:
        self.verbs.append("ack")

    async def nak(self, delay_s: float = 0.0) -> None:
        self.verbs.append("nak")
        self.delay_s = delay_s

    async def term(self, reason: str) -> None:
        self.verbs.append("term")

    async def in_progress(self) -> None: ...


class Worker:
    """A JobRunner between a link and an engine that do what the test says."""

    def __init__(
        self, transfer_worker: Callable[[], Coroutine[Any, Any, Any]], deadline_s: float = 60
    ) -> None:
        self.sent: list[Any] = []
        self.tasks: list[Any] = []
        self.reason = ""
        self.asked = asyncio.Event()
        self._transfer_worker = transfer_worker
        self.grant = Grant(
            rid=1, job_id="j", attempt=1, incarnation="i", deadline_s=deadline_s,
            job_digest=job_digest(BODY), fence=FenceToken(slot=0, epoch=1),
        )  # fmt: skip
        self.link: Any = SimpleNamespace(
            record=SimpleNamespace(instance_id="d", incarnation="i"), claim=self._claim,
            transfer=SimpleNamespace(get=self._reach, current=None, held=nullcontext),
            commit=self._commit, send=self.sent.append,
        )  # fmt: skip
        self.link.give_up = partial(DecodeLink.give_up, self.link)
        self.known = True
        links: Any = SimpleNamespace(
            find=self._find, knows=lambda _: self.known, is_up=lambda _: self.known
        )
        engine: Any = SimpleNamespace(
            block_size=4, groups=1, compat_hash="c", submit=self.tasks.append,
            end=lambda _: None,
        )  # fmt: skip
        self.runner = JobRunner(
            links, engine, heartbeat_s=lambda: 60, max_prompt_tokens=100, max_deliver=lambda: 5
        )

    async def _find(self, instance_id: str) -> Any:
        if not self.known:
            raise PeerUnavailable(f"decode worker {instance_id} is gone")
        return self.link

    async def _claim(self, *_: Any) -> Grant:
        return self.grant

    async def _reach(self) -> Any:
        self.asked.set()
        return await self._transfer_worker()

    async def _commit(self, make: Any, **_: float) -> CommitReply:
        return CommitReply(rid=1, ok=not self.reason, reason=self.reason)

    def revoke(self, attempt: int = 1) -> None:
        revoke = Revoke(job_id="j", attempt=attempt, reason="cancelled")
        self.runner.revoked(self.link, revoke)

    async def over(self) -> None:
        await asyncio.wait_for(self.runner.idle.wait(), 10)

    async def computing(self) -> Any:
        async with asyncio.timeout(10):
            while not self.tasks:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        return self.tasks[0]


async def some_transfer_worker() -> Any:
    return SimpleNamespace(transport="fake", why_not_better=(), let_go=lambda _: None)


def out_of_reach() -> Reach:
    async def raises() -> Any:
        raise OutOfReach("its KV port does not answer")

    return raises


def never() -> Reach:
    async def waits() -> Any:
        await asyncio.Event().wait()

    return waits


def back(worker: Worker) -> GiveUp:
    (said,) = worker.sent
    assert isinstance(said, GiveUp)
    return said


# ------------------------------------------------------------------ a peer's fault is no poison


@pytest.mark.parametrize("inputs", [True, False])
async def test_a_job_counts_while_the_inputs_of_others_are_sent(inputs: bool) -> None:
    """Otherwise this worker would pull up to 64, and other workers would get none."""
    worker, held = Worker(never()), 0
    body = encode(msgspec.structs.replace(JOB, features="digest" if inputs else ""))

    async def holds(*_: Any) -> Grant:
        nonlocal held
        held += 1
        raise ClaimRefused("held", reason=RefuseReason.HELD, retry_after_s=2 * CLAIM_S)

    worker.link.claim = holds
    delivery = Delivered()
    delivery.body = body
    worker.runner.start(delivery)  # type: ignore[arg-type]
    await eventually(lambda: held > 1)
    assert worker.runner.in_flight_tokens == (delivery.tokens if inputs else 0)
    await worker.runner.abandon()
    assert worker.runner.in_flight_tokens == 0


async def test_nonsense_from_the_kv_port_in_the_middle_is_no_poison() -> None:
    """As a session raises it when the owner refuses a write or breaks off."""
    worker, delivery = Worker(some_transfer_worker), Delivered()
    worker.runner.start(delivery)  # type: ignore[arg-type]
    (await worker.computing()).end(BadMessage("the owner refuses: a block is outside the grant"))
    await worker.over()
    assert delivery.verbs == ["nak"]
    assert back(worker).retry


async def test_an_unexpected_failure_gives_the_grant_up() -> None:
    async def raises() -> Any:
        raise ValueError("unexpected")

    worker, delivery = Worker(raises), Delivered()
    worker.runner.start(delivery)  # type: ignore[arg-type]
    await worker.over()
    assert delivery.verbs == ["nak"]
    said = back(worker)
    assert (said.job_id, said.attempt, said.retry) == ("j", 1, True)
    assert (worker.runner.completed, worker.runner.failed) == (0, 1)


async def test_the_blocks_that_the_job_names_are_written() -> None:
    """The grant names none: its digest says that the job's are the published ones."""
    job = msgspec.structs.replace(
        JOB, token_ids=u32.pack(range(12)), hit_tokens=4, block_ids=u32.pack([9, 5, 7])
    )
    worker, delivery = Worker(some_transfer_worker), Delivered()
    delivery.body = encode(job)
    worker.grant = msgspec.structs.replace(worker.grant, job_digest=job_digest(delivery.body))
    worker.runner.start(delivery)  # type: ignore[arg-type]
    task = await worker.computing()
    assert (task.remote_blocks, task.first_target) == ([9, 5, 7], 1)
    task.end(None)
    await worker.over()
    assert delivery.verbs == ["ack"]


async def test_a_job_that_is_not_what_was_granted_is_poison() -> None:
    worker, delivery = Worker(some_transfer_worker), Delivered()
    worker.grant = Grant(
        rid=1, job_id="j", attempt=1, incarnation="i", deadline_s=60, job_digest=b"another",
        fence=FenceToken(slot=0, epoch=1),
    )  # fmt: skip
    worker.runner.start(delivery)  # type: ignore[arg-type]
    await worker.over()
    assert delivery.verbs == ["term"]
    assert not back(worker).retry


async def test_a_grant_of_a_newer_incarnation_waits_for_the_newer_link() -> None:
    worker, delivery = Worker(some_transfer_worker), Delivered()
    worker.link.record.incarnation = "before"
    worker.runner.start(delivery)  # type: ignore[arg-type]
    await worker.over()
    assert not worker.tasks, "the memory behind this link would refuse every write"
    assert delivery.verbs == ["nak"], "or the queue waits until nobody says in_progress any more"
    assert delivery.delay_s > 0.1
    assert back(worker).retry


# ------------------------------------------------------------------ waiting for the transfer worker


@pytest.mark.parametrize("end", ["revoke", "lost", "deadline", "revoke and lost"])
async def test_what_ends_the_attempt_ends_the_wait_for_its_transfer_worker(end: str) -> None:
    worker = Worker(never(), deadline_s=0.05 if end == "deadline" else 60)
    delivery = Delivered()
    worker.runner.start(delivery)  # type: ignore[arg-type]
    await asyncio.wait_for(worker.asked.wait(), 10)
    if "revoke" in end:
        worker.revoke()
    if "lost" in end:
        worker.runner.connection_lost(worker.link)
    await worker.over()
    # The decode worker naks what it revoked, and the deliveries of a connection that broke.
    assert delivery.verbs == (["nak"] if end == "deadline" else [])
    assert (worker.sent == []) if end == "lost" else back(worker).retry
    assert not worker.tasks


async def test_a_transfer_worker_that_is_there_is_not_waited_for() -> None:
    worker, delivery = Worker(never()), Delivered()
    worker.link.transfer.current = await some_transfer_worker()
    worker.runner.start(delivery)  # type: ignore[arg-type]
    task = await worker.computing()
    assert task.transfer_worker is worker.link.transfer.current
    assert not worker.asked.is_set()
    task.end(None)
    await worker.over()
    assert delivery.verbs == ["ack"]


async def test_a_grant_that_was_revoked_before_is_not_begun_though_a_transfer_worker_is_there() -> (
    None
):
    worker, delivery = Worker(never()), Delivered()
    worker.link.transfer.current = await some_transfer_worker()
    real = worker.link.claim

    async def claim(*asked: Any) -> Grant:
        worker.revoke()
        return await real(*asked)

    worker.link.claim = claim
    worker.runner.start(delivery)  # type: ignore[arg-type]
    await worker.over()
    assert not worker.tasks
    assert delivery.verbs == []


async def test_the_revoke_of_an_older_attempt_does_not_end_the_wait() -> None:
    worker, delivery = Worker(never()), Delivered()
    worker.runner.start(delivery)  # type: ignore[arg-type]
    await asyncio.wait_for(worker.asked.wait(), 10)
    worker.revoke(attempt=0)
    await asyncio.sleep(0.02)
    assert worker.runner.in_flight == 1
    await worker.runner.abandon()
    assert delivery.verbs == ["nak"]


# ------------------------------------------------------------------ revoked


async def test_quiet_is_said_when_the_copy_is_over_and_no_thread_waits_for_it() -> None:
    worker, delivery = Worker(some_transfer_worker), Delivered()
    worker.runner.start(delivery)  # type: ignore[arg-type]
    task = await worker.computing()
    task.submit()
    threads = threading.active_count()
    worker.revoke()
    await asyncio.sleep(0.02)
    assert [type(said) for said in worker.sent] == [GiveUp]
    assert threading.active_count() <= threads
    assert not worker.runner.idle.is_set(), "a drain waits a moment for it"
    await asyncio.to_thread(task.submitted_over)
    await worker.over()
    assert [type(said) for said in worker.sent] == [GiveUp, DrainAck]


async def test_quiet_is_said_at_once_when_nothing_is_copied() -> None:
    worker, delivery = Worker(some_transfer_worker), Delivered()
    worker.runner.start(delivery)  # type: ignore[arg-type]
    await worker.computing()
    worker.revoke()
    await worker.over()
    assert {type(said) for said in worker.sent} == {GiveUp, DrainAck}


# ------------------------------------------------------------------ a commit that is refused


@pytest.mark.parametrize(
    ("reason", "verbs"), [("stale", []), ("wrong_block_count", ["ack"]), ("", ["ack"])]
)
async def test_a_stale_commit_settles_nothing(reason: str, verbs: list[str]) -> None:
    """Another worker may have claimed the job: an ack would take the message away under it."""
    worker, delivery = Worker(some_transfer_worker), Delivered()
    worker.reason = reason
    worker.runner.start(delivery)  # type: ignore[arg-type]
    (await worker.computing()).end(None)
    await worker.over()
    assert delivery.verbs == verbs
    assert worker.runner.completed == (not reason)


async def test_who_stops_before_a_job_began_keeps_nothing_of_it() -> None:
    """Its task was never entered, so nothing in it can say that it is over."""
    worker, delivered = Worker(some_transfer_worker), Delivered()
    worker.runner.start(delivered)
    assert worker.runner.in_flight == 1
    async with asyncio.timeout(10):
        await worker.runner.abandon()
    assert worker.runner.idle.is_set()
    assert (worker.runner.in_flight, worker.runner.in_flight_tokens) == (0, 0)
