"""One job on a prefill worker: how its message is settled, and who is told what."""

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
from hypothesis import given
from hypothesis import strategies as st

from pullfill.errors import BadMessage, ClaimRefused, PeerUnavailable
from pullfill.ids import job_digest
from pullfill.net.peer_link import ConnectionLost
from pullfill.prefill_worker.decode_links import DecodeLink
from pullfill.prefill_worker.engine import NoAdapter
from pullfill.prefill_worker.handoff import Handoff, Pace, patience
from pullfill.prefill_worker.puller import Budget, Puller
from pullfill.prefill_worker.reach import OutOfReach
from pullfill.prefill_worker.read_grants import ReadGrants
from pullfill.prefill_worker.transfer_worker import Credits
from pullfill.runtime.health import ServerHealth
from pullfill.wire import (
    Adapter,
    CommitReply,
    DrainAck,
    FenceToken,
    GiveUp,
    Grant,
    PrefillJob,
    Progress,
    RefuseReason,
    Revoke,
    decode,
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

    async def in_progress(self) -> None:
        self.verbs.append("in_progress")


class Worker:
    """A Puller between a link and an engine that do what the test says."""

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
            name="d", record=SimpleNamespace(incarnation="i"), claim=self._claim,
            transfer=SimpleNamespace(get=self._reach, current=None, held=nullcontext),
            commit=self._commit, send=self.sent.append,
        )  # fmt: skip
        self.link.jobs = {}
        self.link.give_up = partial(DecodeLink.give_up, self.link)
        self.known = True
        links: Any = SimpleNamespace(
            find=self._find, knows=lambda _: self.known, is_up=lambda _: self.known,
            pause=lambda _: None,
        )  # fmt: skip
        engine: Any = SimpleNamespace(
            block_size=4, groups=1, compat_hash="c", submit=self.tasks.append,
            end=lambda _: None, check_adapter=self._check_adapter,
        )  # fmt: skip
        self.left: list[float] = []
        self.budget = Budget(10**6)
        consumer: Any = SimpleNamespace(ack_wait_s=60.0, max_deliver=5)
        (nats := ServerHealth("nats")).ok()
        self.puller = Puller(
            consumer, links, engine, self.budget, Credits(1), ReadGrants(None), nats,
            max_prompt_tokens=100,
        )  # fmt: skip

    async def _check_adapter(self, adapter: Adapter) -> None:
        raise NoAdapter(f"LoRA adapter {adapter.name} is not at {adapter.path} here")

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
        self.link.jobs["j"].revoke(Revoke(job_id="j", attempt=attempt, reason="cancelled"))

    async def over(self) -> None:
        await asyncio.wait_for(self.puller.idle.wait(), 10)

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
        raise ClaimRefused("held", reason=RefuseReason.HELD, retry_after_s=0.1)

    worker.link.claim = holds
    delivery = Delivered()
    delivery.body = body
    worker.puller.begin(delivery)  # type: ignore[arg-type]
    await eventually(lambda: held > 1)
    assert worker.budget.tokens == (delivery.tokens if inputs else 0)
    await worker.puller.abandon()
    assert worker.budget.tokens == 0


async def test_nonsense_from_the_kv_port_in_the_middle_is_no_poison() -> None:
    """As a session raises it when the owner refuses a write or breaks off."""
    worker, delivery = Worker(some_transfer_worker), Delivered()
    worker.puller.begin(delivery)  # type: ignore[arg-type]
    (await worker.computing()).end(BadMessage("the owner refuses: a block is outside the grant"))
    await worker.over()
    assert delivery.verbs == ["nak"]
    assert back(worker).retry


async def test_an_unexpected_failure_gives_the_grant_up() -> None:
    async def raises() -> Any:
        raise ValueError("unexpected")

    worker, delivery = Worker(raises), Delivered()
    worker.puller.begin(delivery)  # type: ignore[arg-type]
    await worker.over()
    assert delivery.verbs == ["nak"]
    said = back(worker)
    assert (said.job_id, said.attempt, said.retry) == ("j", 1, True)
    assert (worker.budget.completed, worker.budget.failed) == (0, 1)


async def test_the_blocks_that_the_job_names_are_written() -> None:
    """The grant names none: its digest says that the job's are the published ones."""
    job = msgspec.structs.replace(
        JOB, token_ids=u32.pack(range(12)), hit_tokens=4, block_ids=u32.pack([9, 5, 7])
    )
    worker, delivery = Worker(some_transfer_worker), Delivered()
    delivery.body = encode(job)
    worker.grant = msgspec.structs.replace(worker.grant, job_digest=job_digest(delivery.body))
    worker.puller.begin(delivery)  # type: ignore[arg-type]
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
    worker.puller.begin(delivery)  # type: ignore[arg-type]
    await worker.over()
    assert delivery.verbs == ["term"]
    assert not back(worker).retry


async def test_a_grant_of_a_newer_incarnation_waits_for_the_newer_link() -> None:
    worker, delivery = Worker(some_transfer_worker), Delivered()
    worker.link.record.incarnation = "before"
    worker.puller.begin(delivery)  # type: ignore[arg-type]
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
    worker.puller.begin(delivery)  # type: ignore[arg-type]
    await asyncio.wait_for(worker.asked.wait(), 10)
    if "revoke" in end:
        worker.revoke()
    if "lost" in end:
        worker.link.jobs["j"].link_lost()
    await worker.over()
    # The decode worker naks what it revoked, and the deliveries of a connection that broke.
    assert delivery.verbs == (["nak"] if end == "deadline" else [])
    assert (worker.sent == []) if end == "lost" else back(worker).retry
    assert not worker.tasks


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
    worker.puller.begin(delivery)  # type: ignore[arg-type]
    await worker.over()
    assert not worker.tasks
    assert delivery.verbs == []


# ------------------------------------------------------------------ revoked


async def test_quiet_is_said_when_the_copy_is_over_and_no_thread_waits_for_it() -> None:
    worker, delivery = Worker(some_transfer_worker), Delivered()
    worker.puller.begin(delivery)  # type: ignore[arg-type]
    task = await worker.computing()
    task.submitted += 1
    threads = threading.active_count()
    worker.revoke()
    await asyncio.sleep(0.02)
    assert [type(said) for said in worker.sent] == [GiveUp]
    assert threading.active_count() <= threads
    assert not worker.puller.idle.is_set(), "a drain waits a moment for it"
    await asyncio.to_thread(task.submitted_over)
    await worker.over()
    assert [type(said) for said in worker.sent] == [GiveUp, DrainAck]


# ------------------------------------------------------------------ a commit that is refused


@pytest.mark.parametrize(
    ("reason", "verbs"), [("stale", []), ("wrong_block_count", ["ack"]), ("", ["ack"])]
)
async def test_a_stale_commit_settles_nothing(reason: str, verbs: list[str]) -> None:
    """Another worker may have claimed the job: an ack would take the message away under it."""
    worker, delivery = Worker(some_transfer_worker), Delivered()
    worker.reason = reason
    worker.puller.begin(delivery)  # type: ignore[arg-type]
    (await worker.computing()).end(None)
    await worker.over()
    assert delivery.verbs == verbs
    assert worker.budget.completed == (not reason)


async def test_who_stops_before_a_job_began_keeps_nothing_of_it() -> None:
    """Its task was never entered, so nothing in it can say that it is over."""
    worker, delivered = Worker(some_transfer_worker), Delivered()
    worker.puller.begin(delivered)
    assert worker.puller.in_flight == 1
    async with asyncio.timeout(10):
        await worker.puller.abandon()
    assert worker.puller.idle.is_set()
    assert (worker.puller.in_flight, worker.budget.tokens) == (0, 0)


# ------------------------------------------------------------------ out of reach


async def test_memory_out_of_reach_is_left_to_another_worker_for_a_while() -> None:
    worker, delivery, told = Worker(out_of_reach()), Delivered(), list[float]()
    worker.puller.leave_to_others = told.append  # type: ignore[method-assign]
    worker.puller.begin(delivery)  # type: ignore[arg-type]
    await worker.over()
    assert delivery.verbs == ["nak"]
    assert delivery.delay_s > 0.1, "or it would be back here at once, until it is a dead letter"
    assert told, "another worker may be idle"
    assert back(worker).retry


async def test_memory_still_out_of_reach_is_computed_by_the_decode_worker() -> None:
    worker, delivery = Worker(out_of_reach()), Delivered(number=2)
    worker.puller.begin(delivery)  # type: ignore[arg-type]
    await worker.over()
    assert delivery.verbs == ["ack"]
    assert not back(worker).retry


@pytest.mark.parametrize(("number", "verb"), [(1, "nak"), (2, "ack")])
async def test_the_job_of_a_decode_worker_unknown_here_is_first_left_to_others(
    number: int, verb: str
) -> None:
    worker, delivery = Worker(some_transfer_worker), Delivered(number=number)
    worker.known = False
    worker.puller.begin(delivery)  # type: ignore[arg-type]
    await worker.over()
    assert delivery.verbs == [verb]
    assert verb == "ack" or delivery.delay_s > 0.1


async def test_a_job_whose_connection_broke_under_its_claim_is_kept_for_others() -> None:
    """The decode worker may have left the directory because it drains. Others are connected."""
    worker, delivery = Worker(some_transfer_worker), Delivered(number=2)

    async def breaks(*_: Any) -> Any:
        worker.known = False
        worker.link.jobs["j"].link_lost()
        raise ConnectionLost("it broke")

    worker.link.claim = breaks
    worker.puller.begin(delivery)  # type: ignore[arg-type]
    await worker.over()
    assert delivery.verbs == ["nak"]


@pytest.mark.parametrize(("number", "verb", "retry"), [(1, "nak", True), (2, "ack", False)])
async def test_a_job_whose_adapter_is_not_here_is_left_to_others_once(
    number: int, verb: str, retry: bool
) -> None:
    worker, delivery = Worker(some_transfer_worker), Delivered(number=number)
    adapter = Adapter(name="red", path="/red", content="c")
    delivery.body = encode(msgspec.structs.replace(JOB, adapter=adapter))
    worker.grant = msgspec.structs.replace(worker.grant, job_digest=job_digest(delivery.body))
    worker.puller.begin(delivery)  # type: ignore[arg-type]
    await worker.over()
    assert delivery.verbs == [verb]
    said = back(worker)
    assert said.retry is retry
    assert "red is not at" in said.cause
    assert worker.tasks == [], "nothing was computed"


# ------------------------------------------------------------------ its message in the queue


async def test_the_newest_delivery_is_settled_and_kept_alive() -> None:
    worker, first, second = Worker(some_transfer_worker), Delivered(), Delivered()
    worker.puller.begin(first)  # type: ignore[arg-type]
    task = await worker.computing()
    worker.puller.begin(second)  # type: ignore[arg-type]
    (job,) = worker.puller._jobs.values()
    await job.heartbeat()
    task.end(None)
    await worker.over()
    assert (first.verbs, second.verbs) == ([], ["in_progress", "ack"])


async def test_a_delivery_that_its_run_did_not_settle_runs_again() -> None:
    """A newer delivery that came while its run ended without settling it, or after a nak."""
    puller: Any = None
    first, second, third = Delivered(), Delivered(), Delivered()
    job = Handoff(puller, first)  # type: ignore[arg-type]
    assert job.left_over is None, "left to somebody else"
    job.latest = second  # type: ignore[assignment]
    assert job.left_over is second
    job = Handoff(puller, second)  # type: ignore[arg-type]
    await job.settle("nak")
    job.latest = third  # type: ignore[assignment]
    assert job.left_over is third
    assert third.verbs == []


@given(st.floats(0.01, 3600), st.integers(2, 12))
def test_deliveries_last_until_the_decode_worker_gives_up(
    timeout_s: float, max_deliver: int
) -> None:
    waits = []
    for delivery in range(1, max_deliver + 1):
        wait = patience(timeout_s, delivery, max_deliver)
        if wait is None:
            break
        assert delivery < max_deliver, "the last delivery gets no nak: it would be a dead letter"
        waits.append(wait)
    assert wait is None
    assert sum(waits) >= timeout_s, "nobody waits for it any more"
    if waits and timeout_s > 60 and max_deliver == 5:
        assert waits[0] <= 0.05, "another worker may reach it, and be idle"
        assert waits[1] <= timeout_s / 15


# ------------------------------------------------------------------ its pace

DEADLINE_S = 0.2


class Attempt:
    """One attempt, and what its decode worker was told."""

    def __init__(self, deadline_s: float = DEADLINE_S, still_s: float = 0.0) -> None:
        self.told: list[Progress] = []
        link: Any = SimpleNamespace(send=self.told.append)
        grant = Grant(
            rid=1, job_id="j", attempt=1, incarnation="i", deadline_s=deadline_s,
            job_digest=b"d", fence=FenceToken(slot=0, epoch=0),
        )  # fmt: skip
        self.task: Any = SimpleNamespace(
            job_id="j", attempt=1, scheduled=0, submitted=0, written_blocks=0, write_s=0.0,
            transfer_worker=SimpleNamespace(moved_bytes=0),
        )  # fmt: skip
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pace = Pace(link, grant, still_s)
        self.pace.watch(self.task, self.done)


async def took(attempt: Attempt) -> float:
    """Seconds until it was ended."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10):
            await attempt.done
    return loop.time() - began


async def test_one_that_stands_still_ends_at_its_deadline() -> None:
    attempt = Attempt()
    assert 0.9 * DEADLINE_S <= await took(attempt) < 5
    assert attempt.told == []


async def test_one_that_moves_gets_more_time_and_says_so() -> None:
    attempt = Attempt(still_s=0.3)
    attempt.task.scheduled = 2
    attempt.task.written_blocks = 1
    seconds = await took(attempt)
    assert 0.3 <= seconds < 5, "0.3 s from the look that saw it"
    assert [progress.blocks for progress in attempt.told] == [1]


async def test_after_a_preemption_no_negative_number_of_blocks_is_told() -> None:
    """The decode worker would close the connection."""
    attempt = Attempt(still_s=60.0)
    for scheduled, written in ((5, 3), (7, 1), (9, 4)):
        attempt.task.scheduled, attempt.task.written_blocks = scheduled, written
        attempt.pace.look()
    attempt.pace.stop()
    assert [decode(encode(told), Progress).blocks for told in attempt.told] == [3, 0, 3]


async def test_what_is_over_is_not_looked_at() -> None:
    stopped, over = Attempt(), Attempt()
    for _ in range(2):
        stopped.pace.stop()
    over.done.set_result(None)
    for attempt in (stopped, over):
        attempt.task.scheduled = 2
    await asyncio.sleep(1.5 * DEADLINE_S)
    assert not stopped.done.done()
    assert stopped.told == over.told == []
