"""One timer tells the queue of all jobs that run, and stops when none does."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.errors import ClaimRefused, PeerUnavailable
from pullfill.prefill_worker.jobs import JobRunner
from pullfill.prefill_worker.read_grants import ReadGrants
from pullfill.queue.nats_connection import NotSent
from pullfill.runtime import failpoints
from pullfill.testing.loopback import LoopbackFences
from pullfill.wire import PrefillJob, RefuseReason, encode, u32
from tests.support.nats import until
from tests.unit.prefill_worker.test_read_grants import TransferWorker, kept_task

EVERY_S = 0.04


class Delivered:
    """A `Delivery` of a job whose decode worker has the job's name."""

    tokens, number, ack_subject, age_s = 4, 1, "", 0.0

    def __init__(self, job_id: str, error: Exception | None = None) -> None:
        job = PrefillJob(
            job_id=job_id, incarnation="i", decode_instance=job_id,
            request_id="r", compat="c", token_ids=u32.pack([1, 2, 3, 4]), hit_tokens=0,
            block_ids=u32.pack([0]), timeout_s=60.0,
        )  # fmt: skip
        self.job_id, self.body = job_id, encode(job)
        self.told: list[float] = []
        self._error = error

    async def in_progress(self) -> None:
        self.told.append(asyncio.get_running_loop().time())
        if self._error:
            raise self._error

    async def nak(self, delay_s: float = 0.0) -> None: ...


class Jobs:
    """A JobRunner whose jobs wait for their decode workers until the test ends them."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._ends: dict[str, asyncio.Event] = {}
        connections: Any = SimpleNamespace(
            find=self._find, knows=lambda _: True, is_up=lambda _: True
        )
        engine: Any = SimpleNamespace(block_size=4, groups=1, compat_hash="c")
        self.runner = JobRunner(
            connections, engine, heartbeat_s=lambda: every_s, max_prompt_tokens=100,
            max_deliver=lambda: 5,
        )  # fmt: skip

    async def _find(self, name: str) -> Any:
        await self._ends[name].wait()
        raise PeerUnavailable(f"{name} is gone")

    def begin(self, name: str, error: Exception | None = None) -> Delivered:
        self._ends[name] = asyncio.Event()
        delivery: Any = Delivered(name, error)
        self.runner.start(delivery)
        return delivery  # type: ignore[no-any-return]

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
        async with asyncio.timeout(10):
            while any(name in self.runner._jobs for name in names):  # noqa: ASYNC110
                await asyncio.sleep(0)


async def test_all_are_told_together_as_long_as_they_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, jobs, due = asyncio.get_running_loop(), Jobs(), list[Any]()
    real = loop.call_at

    def call_at(when: float, call: Any, *args: Any, **more: Any) -> Any:
        if getattr(call, "__self__", None) is not jobs.runner:
            return real(when, call, *args, **more)
        return due.append(call)

    async def pass_times(count: int) -> None:
        for _ in range(count):
            (call,) = due
            due.clear()
            call()
            if jobs.runner._sends_heartbeats:
                assert jobs.runner._heartbeats is not None
                await jobs.runner._heartbeats

    monkeypatch.setattr(loop, "call_at", call_at)
    first, second = jobs.begin("a"), jobs.begin("b")
    assert not first.told
    await pass_times(2)
    assert len(first.told) == 2
    assert len(second.told) == 2, "sooner than it need be: with the others"
    await jobs.end("a")
    await pass_times(2)
    assert (len(first.told), len(second.told)) == (2, 4)
    await jobs.end("b")
    await pass_times(1)
    assert not jobs.runner._sends_heartbeats
    assert not due
    again = jobs.begin("c")
    await pass_times(2)
    assert len(again.told) == 2
    await jobs.end("c")


async def test_a_job_has_one_task_and_short_ones_share_a_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, jobs, timers = asyncio.get_running_loop(), Jobs(60.0), list[Any]()
    real = loop.call_at

    def call_at(when: float, call: Any, *args: Any, **more: Any) -> Any:
        if getattr(call, "__self__", None) is jobs.runner:
            timers.append(call)
        return real(when, call, *args, **more)

    monkeypatch.setattr(loop, "call_at", call_at)
    before = asyncio.all_tasks()
    for number in range(100):
        jobs.begin(f"j{number}")
        assert len(asyncio.all_tasks() - before) == 1
        await jobs.end(f"j{number}")
    assert len(timers) == 1
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_one_that_cannot_be_told_of_does_not_keep_the_others_from_it() -> None:
    jobs = Jobs()
    bad, good = jobs.begin("bad", NotSent("away")), jobs.begin("good")
    await until(lambda: len(good.told) == 2)
    assert len(bad.told) == 2
    await jobs.end("bad", "good")
    await until(lambda: not jobs.runner._sends_heartbeats)


async def test_the_failpoint_keeps_the_queue_from_hearing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_active", failpoints.parse("prefill.heartbeat=error"))
    jobs = Jobs()
    job = jobs.begin("a")
    await until(lambda: failpoints._active["prefill.heartbeat"].hits >= 2)
    assert not job.told
    monkeypatch.setattr(failpoints, "_active", {})
    await until(lambda: bool(job.told))
    await jobs.end("a")
    await until(lambda: not jobs.runner._sends_heartbeats)


async def test_a_job_of_this_process_is_acked_and_not_run() -> None:
    acked: list[str] = []

    class Own(Delivered):
        async def ack(self) -> None:
            acked.append(self.job_id)

    jobs = Jobs()
    jobs.runner._take_back = lambda delivery: delivery.job_id == "own"
    jobs.runner.start(Own("own"))
    assert not jobs.runner.idle.is_set()
    await asyncio.wait_for(jobs.runner.idle.wait(), 5)
    assert (acked, jobs.runner.in_flight) == (["own"], 0)


async def test_a_job_of_this_process_that_another_worker_has_is_left_to_that_worker() -> None:
    """Without its message nobody would hear of the job again if that worker failed."""
    acked: list[int] = []

    class Own(Delivered):
        async def ack(self) -> None:
            acked.append(self.number)

    def take_back(_: object) -> bool:
        raise ClaimRefused("another worker has it", reason=RefuseReason.IN_PROGRESS)

    jobs = Jobs()
    jobs.runner._take_back = take_back
    for number in (1, 5):
        delivery = Own("own")
        delivery.number = number
        jobs.runner.start(delivery)
        await asyncio.wait_for(jobs.runner.idle.wait(), 5)
    assert acked == [5], "the last delivery: it would become a dead letter"
    assert jobs.runner.in_flight == 0


async def test_a_job_of_this_process_whose_last_writer_is_not_proved_quiet_comes_again() -> None:
    """No worker has it, so nobody else settles its message."""
    naks: list[float] = []

    class Own(Delivered):
        async def nak(self, delay_s: float = 0.0) -> None:
            naks.append(delay_s)

    def take_back(_: object) -> bool:
        raise ClaimRefused("a writer may be alive", reason=RefuseReason.HELD)

    jobs = Jobs()
    jobs.runner._take_back = take_back
    for number in (1, 2):
        delivery = Own("own")
        delivery.number = number
        jobs.runner.start(delivery)
        await asyncio.wait_for(jobs.runner.idle.wait(), 5)
        await asyncio.sleep(0)
    assert naks == pytest.approx([0.2, 0.8])


async def test_a_job_counts_as_a_prompt_until_it_is_computed() -> None:
    jobs = Jobs()
    rooms: list[int] = []
    jobs.runner.budget._on_room = lambda: rooms.append(jobs.runner.uncomputed)
    for name in "ab":
        jobs.begin(name)
    assert (jobs.runner.uncomputed, jobs.runner.in_flight_tokens) == (2, 8)
    jobs.runner.budget.computed("a")
    jobs.runner.budget.computed("gone")
    assert (jobs.runner.uncomputed, jobs.runner.in_flight_tokens) == (1, 8), "tokens still travel"
    assert rooms == [1]
    jobs.runner.budget.waits("b")
    assert jobs.runner.uncomputed == 0, "nor does one that only waits for its claim"
    jobs.runner.budget.granted("b")
    assert jobs.runner.uncomputed == 1
    await jobs.end("a", "b")
    assert jobs.runner.uncomputed == 0


async def test_blocks_that_are_still_read_come_back_after_the_jobs_were_abandoned() -> None:
    """The engine of an elastic worker stays."""
    jobs, fences, transfer_worker = Jobs(), LoopbackFences(16, 2), TransferWorker()
    readers, task = ReadGrants(fences), kept_task(transfer_worker)
    slot = fences.valid(readers.open(task))
    slot.holders += 1
    jobs.begin("a")
    jobs.runner.keep(readers.let_go(task))
    await asyncio.wait_for(jobs.runner.abandon(), 5)
    await asyncio.sleep(0.02)
    assert (jobs.runner.no_jobs.is_set(), jobs.runner.idle.is_set()) == (True, False)
    assert (jobs.runner.in_flight, fences.in_use) == (0, 1)
    slot.holders -= 1
    await asyncio.wait_for(jobs.runner.idle.wait(), 5)
    assert transfer_worker.let_go_of == [task]
    assert (jobs.runner.in_flight, fences.in_use) == (0, 0)
