"""One job on a prefill worker: how its message is settled, and who is told what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pullfill.errors import ClaimRefused, HandoffError, PeerUnavailable
from pullfill.ids import job_digest
from pullfill.prefill_worker.decode_links import DecodeLink
from pullfill.prefill_worker.handoff import patience
from pullfill.prefill_worker.puller import Budget, Puller
from pullfill.prefill_worker.reach import OutOfReach
from pullfill.prefill_worker.transfer_worker import Credits
from pullfill.queue.contract import Delivery
from pullfill.runtime.health import ServerHealth
from pullfill.wire import (
    Adapter,
    CommitReply,
    FenceToken,
    GiveUp,
    Grant,
    Hello,
    KvMode,
    PrefillJob,
    Progress,
    RefuseReason,
    Revoke,
    decode,
    encode,
    u32,
)
from tests.support.loopback import LoopbackFences
from tests.support.waiting import soon

JOB = PrefillJob(
    job_id="j", incarnation="i", decode_instance="d", request_id="r",
    compat="c", token_ids=u32.pack([1, 2, 3, 4]), hit_tokens=0, block_ids=u32.pack([0]),
    timeout_s=60.0,
)  # fmt: skip
BODY = encode(JOB)
Reach = Callable[[], Coroutine[Any, Any, Any]]


class Delivered(Delivery):
    """`verbs`: how it was settled. error: how it answers heartbeats and naks."""

    def __init__(
        self,
        number: int = 1,
        job: PrefillJob = JOB,
        error: Exception | None = None,
        tokens: int = 4,
    ) -> None:
        super().__init__(job.job_id, encode(job), tokens, number, "ack")
        self._error = error
        self.verbs: list[str] = []
        self.delay_s = 0.0

    async def _told(self, verb: str, delay_s: Any = 0.0) -> None:
        self.verbs.append(verb)
        self.delay_s = delay_s
        if self._error and verb in ("nak", "in_progress"):
            raise self._error

    ack, nak = partialmethod(_told, "ack"), partialmethod(_told, "nak")
    term, in_progress = partialmethod(_told, "term"), partialmethod(_told, "in_progress")


class Worker:
    """A Puller between a link and an engine that do what the test says."""

    def __init__(
        self,
        reach: Reach | None = None,
        *,
        deadline_s: float = 60,
        budget: Budget | None = None,
        ack_wait_s: float = 60.0,
        nats_up: bool = True,
        **more: Any,
    ) -> None:
        """begins: sets up what the task has done at the first look. more: arguments of `Puller`."""
        self.sent: list[Any] = []
        self.tasks: list[Any] = []
        self.begins: Callable[[Any], None] = lambda _: None
        self.reason = ""
        self.asked = asyncio.Event()
        self.reach = reach or some_transfer_worker
        self.told: list[str] = []
        self.grant = Grant(
            rid=1, job_id="j", attempt=1, incarnation="i", deadline_s=deadline_s,
            job_digest=job_digest(BODY), fence=FenceToken(slot=0, epoch=1),
        )  # fmt: skip
        self.link: Any = SimpleNamespace(
            name="d", record=SimpleNamespace(incarnation="i"), claim=self._claim,
            transfer=SimpleNamespace(connecting=self._connecting, current=None),
            commit=self._commit, send=self.sent.append, connected=True,
        )  # fmt: skip
        self.link.jobs = {}
        self.link.give_up = partial(DecodeLink.give_up, self.link)
        self.known = True
        links: Any = SimpleNamespace(
            find=self._find, knows=lambda _: self.known, is_up=lambda _: self.known,
            pause=self.told.append, trials=asyncio.Queue(), compat=SimpleNamespace(block_size=4),
            hello=Hello(prefill_instance="p", compat="c", max_prompt_tokens=4),
        )  # fmt: skip
        engine: Any = SimpleNamespace(
            groups=1, submit=self._submit, end=lambda _: None, check_adapter=self._check_adapter
        )
        self.budget = budget or Budget(10**6)
        self.credits = Credits(1)
        self.nats = ServerHealth("nats", "nats://h:1")
        if nats_up:
            self.nats.ok()
        consumer: Any = SimpleNamespace(
            pull=self._pull, drain=self._drain, ack_wait_s=ack_wait_s, max_deliver=5,
            health=self.nats,
        )  # fmt: skip
        self.puller = Puller(
            consumer, links, engine, self.budget, self.credits, LoopbackFences(2), **more
        )

    async def _pull(self, wait_s: float) -> Any:
        raise NotImplementedError

    async def _drain(self) -> None: ...

    def _submit(self, task: Any) -> None:
        self.begins(task)
        self.tasks.append(task)

    async def _check_adapter(self, adapter: Adapter) -> None:
        raise OutOfReach(f"LoRA adapter {adapter.name} is not at {adapter.path} here")

    async def _find(self, instance_id: str, **_: bool) -> Any:
        if not self.known:
            raise PeerUnavailable(f"decode worker {instance_id} is gone")
        return self.link

    async def _claim(self, *_: Any) -> Grant:
        return self.grant

    def _connecting(self) -> Any:
        self.asked.set()
        return asyncio.create_task(self.reach())

    async def _commit(self, *_: Any, **__: float) -> CommitReply:
        return CommitReply(rid=1, ok=not self.reason, reason=self.reason)

    def begin(self, delivery: Any = None) -> Any:
        delivery = delivery or Delivered()
        self.puller.begin(delivery)
        return delivery

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
    return SimpleNamespace(
        transport="fake", why_not_better=(), let_go=lambda _: None, moved_bytes=0
    )


async def never() -> Any:
    await asyncio.Event().wait()


def back(worker: Worker) -> GiveUp:
    (said,) = worker.sent
    assert isinstance(said, GiveUp)
    return said


# ------------------------------------------------------------------ what ends an attempt


def broken(worker: Worker, delivery: Delivered) -> None:
    async def fails() -> Any:
        raise ValueError("unexpected")

    worker.reach = fails


def no_adapter(worker: Worker, delivery: Delivered) -> None:
    adapter = Adapter(name="red", path="/red", content="c")
    delivery.body = encode(msgspec.structs.replace(JOB, adapter=adapter))
    worker.grant = msgspec.structs.replace(worker.grant, job_digest=job_digest(delivery.body))


def unknown(worker: Worker, delivery: Delivered) -> None:
    """Its decode worker is not in the directory."""
    worker.known = False


def odd(worker: Worker, delivery: Delivered) -> None:
    worker.link.claim = Mock(side_effect=HandoffError("unexpected"))


def too_long(worker: Worker, delivery: Delivered) -> None:
    worker.puller.links.hello = Hello(prefill_instance="p", compat="c", max_prompt_tokens=3)


@pytest.mark.parametrize(
    ("fault", "number", "verb", "later", "retry"),
    [
        (odd, 1, "nak", False, None),
        (too_long, 5, "ack", False, False),
        (broken, 1, "nak", False, True),
        (no_adapter, 1, "nak", True, True),
        (no_adapter, 2, "ack", False, False),
        (unknown, 1, "nak", True, None),
        (unknown, 2, "ack", False, None),
    ],
)
async def test_what_cannot_be_computed_here_is_settled_once(
    fault: Callable[[Worker, Delivered], None],
    number: int,
    verb: str,
    later: bool,
    retry: bool | None,
) -> None:
    """later: or it would be back here at once, until it is a dead letter. retry: what the decode
    worker is told. None: it has not granted the job."""
    worker, delivery = Worker(), Delivered(number)
    fault(worker, delivery)
    worker.begin(delivery)
    await worker.over()
    assert not worker.tasks, "nothing was computed"
    assert delivery.verbs == [verb]
    assert (delivery.delay_s > 0.1) == later
    assert [said.retry for said in worker.sent] == ([] if retry is None else [retry])
    counted = worker.budget.completed, worker.budget.failed, worker.budget.tokens
    assert counted == (0, fault is not unknown, 0)


@pytest.mark.parametrize(
    ("reason", "number", "verbs"),
    [
        (RefuseReason.CLOSED, 1, ["ack"]),
        (RefuseReason.HELD, 1, ["ack"]),  # for longer than the job may take
        (RefuseReason.IN_PROGRESS, 1, []),  # its holder settles it
        (RefuseReason.IN_PROGRESS, 5, ["ack"]),  # or it would become a dead letter
    ],
)
async def test_a_refused_claim_takes_no_message_from_who_holds_the_job(
    reason: RefuseReason, number: int, verbs: list[str]
) -> None:
    async def refuses(*_: Any) -> Grant:
        raise ClaimRefused("no", reason=reason, retry_after_s=JOB.timeout_s + 1)

    worker, delivery = Worker(never), Delivered(number)
    worker.link.claim = refuses
    worker.begin(delivery)
    await worker.over()
    assert delivery.verbs == verbs


@pytest.mark.parametrize("inputs", [True, False])
async def test_a_job_counts_while_the_inputs_of_others_are_sent(inputs: bool) -> None:
    """Otherwise this worker would pull up to 64, and other workers would get none."""
    worker, held = Worker(never), 0
    body = encode(msgspec.structs.replace(JOB, features="digest" if inputs else ""))

    async def holds(*_: Any) -> Grant:
        nonlocal held
        held += 1
        raise ClaimRefused("held", reason=RefuseReason.HELD, retry_after_s=0.1)

    worker.link.claim = holds
    delivery = Delivered()
    delivery.body = body
    worker.begin(delivery)
    await soon(lambda: held > 1)
    assert worker.budget.tokens == (delivery.tokens if inputs else 0)
    await worker.puller.abandon()
    assert worker.budget.tokens == 0


@pytest.mark.parametrize("again", [True, False])
async def test_a_connection_that_was_lost_while_the_job_was_held(again: bool) -> None:
    """again: it is made again, and the grant comes over the new one. Nobody else would settle the
    job. If not, the decode worker may drain and have left the directory: other workers are
    connected to it, so the job is kept for them."""
    worker, delivery, asked = Worker(), Delivered(number=2), 0

    def lost() -> None:
        worker.known = worker.link.connected = again
        worker.link.jobs["j"].link_lost()

    async def claim(*_: Any) -> Grant:
        nonlocal asked
        asked += 1
        if asked == 1:
            asyncio.get_running_loop().call_soon(lost)
            raise ClaimRefused("held", reason=RefuseReason.HELD, retry_after_s=0.01)
        if not again:
            raise PeerUnavailable("worker d is not connected")
        return worker.grant

    worker.link.claim = claim
    worker.begin(delivery)
    if again:
        (await worker.computing()).end(None)
    await worker.over()
    assert (asked, delivery.verbs, worker.sent) == (2, ["ack" if again else "nak"], [])


# ------------------------------------------------------------------ waiting for the transfer worker


@pytest.mark.parametrize("end", ["revoke", "lost", "deadline", "revoke and lost"])
async def test_what_ends_the_attempt_ends_the_wait_for_its_transfer_worker(end: str) -> None:
    worker = Worker(never, deadline_s=0.05 if end == "deadline" else 60)
    delivery = Delivered()
    worker.begin(delivery)
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
    worker, delivery = Worker(never), Delivered()
    worker.link.transfer.current = await some_transfer_worker()
    real = worker.link.claim

    async def claim(*asked: Any) -> Grant:
        worker.revoke()
        return await real(*asked)

    worker.link.claim = claim
    worker.begin(delivery)
    await worker.over()
    assert not worker.tasks
    assert delivery.verbs == []


# ------------------------------------------------------------------ revoked


async def test_a_late_revoke_of_another_attempt_ends_nothing() -> None:
    worker, delivery = Worker(), Delivered()
    worker.grant = msgspec.structs.replace(worker.grant, attempt=2)
    worker.begin(delivery)
    task = await worker.computing()
    worker.revoke(attempt=1)
    task.end(None)
    await worker.over()
    assert (delivery.verbs, worker.sent) == (["ack"], [])


async def test_blocks_that_may_be_read_stay_when_we_leave() -> None:
    """Nothing can be proved any more. Else the proof gives them back: test_handoff.py (contract)"""
    worker, freed = Worker(), list[Any]()
    worker.grant = msgspec.structs.replace(worker.grant, mode=KvMode.PULL)

    async def commit(*_: Any, **__: float) -> CommitReply:
        worker.puller.fences.close()
        return CommitReply(rid=1, ok=True)

    worker.link.commit = commit
    delivery = worker.begin()
    task = await worker.computing()
    task.kept, task.transfer_worker.let_go = {0: 3}, freed.append
    task.end(None)
    await worker.over()
    assert (delivery.verbs, freed) == (["ack"], [])


# ------------------------------------------------------------------ its message in the queue


async def test_a_delivery_that_comes_during_a_run_that_settles_nothing_runs_next() -> None:
    """The decode worker naks what it granted over a connection that was lost. The queue may deliver
    it to the same worker, before its run is over."""
    worker, first, second = Worker(), Delivered(), Delivered(2)
    worker.begin(first)
    await worker.computing()
    worker.begin(second)
    worker.link.jobs["j"].link_lost()
    await soon(lambda: len(worker.tasks) == 2)
    worker.tasks[1].end(None)
    await worker.over()
    assert (first.verbs, second.verbs) == ([], ["ack"])


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


async def test_after_a_preemption_no_negative_number_of_blocks_is_told() -> None:
    """The decode worker would close the connection."""
    worker = Worker(deadline_s=0.2)

    def done(task: Any, scheduled: int, written: int) -> None:
        task.scheduled, task.written_blocks = scheduled, written

    worker.begins = partial(done, scheduled=5, written=3)
    worker.begin(Delivered())
    task = await worker.computing()
    for told, (scheduled, written) in enumerate(((5, 3), (7, 1), (9, 4))):
        done(task, scheduled, written)
        await soon(lambda told=told: len(worker.sent) > told)  # type: ignore[misc]
    await worker.puller.abandon()
    blocks = [decode(encode(said), Progress).blocks for said in worker.sent[:3]]
    assert blocks == [3, 0, 3]


@pytest.mark.parametrize("waits", [True, False])
async def test_copies_for_other_jobs_are_progress_only_while_its_own_waits_behind_them(
    waits: bool,
) -> None:
    """Otherwise an attempt whose engine stands still would never end beside one that moves. But
    with progress it gets the whole `timeout_s` anew, and the decode worker is told."""
    worker, delivery = Worker(deadline_s=0.2), Delivered()

    def moves(task: Any) -> None:
        task.submitted, task.transfer_worker.moved_bytes = int(waits), 100

    worker.begins = moves
    worker.begin(delivery)
    task = await worker.computing()
    if not waits:
        await worker.over()
        assert (delivery.verbs, back(worker).cause) == (["nak"], "timeout")
        assert task.cancelled, "its copies that wait are not made"
        return
    await soon(lambda: bool(worker.sent))
    await asyncio.sleep(0.4)
    (said,) = worker.sent
    assert (type(said), said.blocks, said.write_s) == (Progress, 0, 0.0)
    task.submitted = 0
    task.end(None)
    await worker.over()
    assert delivery.verbs == ["ack"]
