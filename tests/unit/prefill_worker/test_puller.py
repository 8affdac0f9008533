"""What is pulled and when, what runs, and why nothing is pulled."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from pullfill.errors import ClaimRefused, QueueUnavailable
from pullfill.prefill_worker.puller import MAX_WAITING, Budget
from pullfill.queue.jetstream import JETSTREAM, PULLS
from pullfill.queue.nats_connection import NotSent
from pullfill.runtime import failpoints
from pullfill.wire import PrefillJob, RefuseReason, encode
from tests.support.waiting import soon
from tests.unit.prefill_worker import test_handoff
from tests.unit.prefill_worker.test_handoff import JOB, Delivered


class Worker(test_handoff.Worker):
    """Its jobs wait for their decode workers until the test ends them.

    A decode worker has the name of its job."""

    def __init__(self, budget: Budget | None = None, **more: Any) -> None:
        self.queue = asyncio.Queue[Any]()
        self.started: list[str] = []
        self.pulls: list[int] = []
        self._ends: dict[str, asyncio.Event] = {}
        super().__init__(budget=budget or Budget(30, claim_s=60.0), **more)

    async def _pull(self, wait_s: float) -> Any:
        self.pulls.append(self.puller.in_flight)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                return await self.queue.get()

    async def _find(self, instance_id: str, **_: bool) -> Any:
        self.started.append(instance_id)
        await self._ends.setdefault(instance_id, asyncio.Event()).wait()
        raise ClaimRefused(f"{instance_id} is over", reason=RefuseReason.CLOSED)

    def granted(self, *names: str) -> None:
        """As if the decode worker had granted them: they count until they are over."""
        for name in names:
            self.budget.granted(name)

    def publish(self, name: str, tokens: int = 10) -> Delivered:
        delivery = Delivered(job=job_of(name), tokens=tokens)
        self.queue.put_nowait(delivery)
        return delivery

    async def runs(self, *names: str) -> None:
        """Until these run, and until what would start another had time for it."""
        async with asyncio.timeout(20.0):
            while len(self.started) < len(names):  # noqa: ASYNC110 - nothing to wait on
                await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert self.started == list(names)

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends.setdefault(name, asyncio.Event()).set()
        await soon(lambda: not any(name in self.puller._jobs for name in names))


def job_of(name: str) -> PrefillJob:
    return replace(JOB, job_id=name, decode_instance=name)


# ------------------------------------------------------------------ how much is pulled


async def test_with_concurrency_one_more_prompt_is_pulled_than_is_computed() -> None:
    """Of any length. KV that travels does not count, up to the most jobs at once."""
    worker = Worker(Budget(1, concurrency=1, claim_s=60.0), max_jobs=4)
    for number in range(6):
        worker.publish(f"j{number}", 1_000_000)
    worker.puller.start()
    await worker.runs("j0", "j1")
    worker.granted("j0", "j1")
    worker.budget.counts_no_more("j0")
    await worker.runs("j0", "j1", "j2")
    worker.granted("j2")
    worker.budget.counts_no_more("j1")
    await worker.runs("j0", "j1", "j2", "j3")
    worker.granted("j3")
    for name in ("j2", "j3", "gone"):
        worker.budget.counts_no_more(name)
    await asyncio.sleep(0.05)
    await worker.runs("j0", "j1", "j2", "j3")  # and no more: it has four
    await worker.puller.close()


async def test_deliveries_that_wait_are_bounded_by_their_number() -> None:
    """A decode worker is not connected. Its jobs use no budget, but no worker pulls all of them."""
    worker = Worker()
    worker.known = False
    for number in range(MAX_WAITING + 10):
        worker.publish(f"j{number}")
    worker.puller.start()
    await soon(lambda: worker.budget.waiting == MAX_WAITING)
    await asyncio.sleep(0.05)
    assert (worker.budget.waiting, worker.budget.tokens) == (MAX_WAITING, 0)
    await worker.puller.close()


async def test_the_job_of_a_self_check_runs_while_nothing_is_pulled() -> None:
    """Also after one that cannot be read: without its task no check would pass any more."""
    worker = Worker()
    worker.puller.pause("check", "it was not compared")
    worker.puller.start()
    for body in (b"nonsense", encode(job_of("trial"))):
        worker.puller.links.trials.put_nowait(SimpleNamespace(job=body))  # type: ignore[arg-type]
    await worker.runs("trial")
    await worker.puller.close()
    assert worker.pulls == []


async def test_a_decode_worker_without_credit_delays_the_jobs_of_others_for_a_while_only() -> None:
    """It is alive and takes no KV. Jobs that wait may be of others."""
    worker = Worker(patience_s=0.1)
    worker.credits.add(worker.credits.open("slow"), 1)
    worker.publish("j")
    began = time.monotonic()
    worker.puller.start()
    await worker.runs("j")
    assert time.monotonic() - began >= 0.1
    await worker.puller.close()


# ------------------------------------------------------------------ why nothing is pulled


async def test_a_pause_ends_the_pull_that_waits() -> None:
    """Five workers that pause would otherwise make a dead letter of the next job."""
    worker = Worker()
    worker.puller.start()
    await soon(lambda: bool(worker.pulls))
    for why in ("stuck", "", "stuck"):
        worker.puller.pause("engine", why)
    await asyncio.sleep(0.02)
    worker.publish("j")
    await asyncio.sleep(0.02)
    assert worker.queue.qsize() == 1
    worker.puller.pause("engine", "")
    await worker.runs("j")
    await worker.puller.close()


async def test_a_job_that_comes_with_a_pause_goes_back() -> None:
    """The engine takes no steps: the job would wait here, and no other worker would get it."""
    worker, delivery = Worker(), Delivered()

    async def pull(*_: float) -> Any:
        worker.puller.pause("engine", "stuck")
        return delivery

    worker.puller.consumer.pull = pull  # type: ignore[method-assign]
    await asyncio.wait_for(worker.puller.pull(), 5)
    assert (delivery.verbs, worker.puller.in_flight) == (["nak"], 0)
    await worker.puller.close()


@pytest.mark.parametrize("failure", [QueueUnavailable("NATS is away"), ValueError("unexpected")])
async def test_a_pull_that_fails_is_tried_again_after_a_moment(failure: Exception) -> None:
    """Also if its worker pauses meanwhile, when no pull is there to be ended."""
    worker, tries, away = Worker(), 0, True

    async def pull(wait_s: float) -> Any:
        nonlocal tries
        tries += 1
        await asyncio.sleep(0)
        if away:
            raise failure
        return await Worker._pull(worker, wait_s)

    worker.puller.consumer.pull = pull  # type: ignore[method-assign]
    worker.publish("j")
    worker.puller.start()
    await soon(lambda: tries == 1)
    for _ in range(100):
        await asyncio.sleep(0)
    assert tries < 10, "a server that is away would be asked without end"
    away = False
    worker.puller.pause("engine", "stuck")
    worker.puller.pause("engine", "")
    await worker.runs("j")
    await worker.puller.close()


async def test_decode_workers_are_told_why_nothing_is_pulled() -> None:
    worker, streams = Worker(), "its own streams leave no time"
    for _ in range(2):
        worker.puller.pause("busy", streams)
    assert worker.told == [streams], "told once"
    worker.puller.pause("engine", "its engine takes no steps")
    worker.puller.pause("busy", "")
    assert worker.puller.paused
    worker.puller.pause("engine", "")
    assert worker.told == [streams, "its engine takes no steps", ""]
    worker.puller.pause("check", "each decode worker is told its own reason")
    worker.puller.pause("check", "")
    worker.nats.failed("no answer", JETSTREAM)
    assert len(worker.told) == 3, "a decode side of this worker publishes, it does not pull"
    worker.nats.failed("no quorum", PULLS)
    worker.nats.ok(PULLS)
    worker.nats.failed("it hangs")
    worker.nats.ok()
    silent = "NATS does not answer it: nats://h:1:"
    assert worker.told[3:] == [f"{silent} no quorum", "", f"{silent} it hangs", ""]
    await worker.puller.close()
    worker.nats.failed("closed")
    assert len(worker.told) == 7


async def test_a_worker_whose_sides_are_being_built_warns_of_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """NATS is dialled once all sides are there."""
    caplog.set_level("INFO")
    worker = Worker(nats_up=False)
    worker.nats.ok()
    assert worker.told == []
    assert caplog.messages == []
    lost = Worker(nats_up=False)
    lost.puller.start()
    assert lost.told == ["NATS does not answer it: not connected yet"]
    await lost.puller.close()


async def test_beside_streams_one_job_is_taken_at_a_time() -> None:
    worker = Worker()
    worker.puller.start()
    await asyncio.sleep(0)
    worker.puller.spare(1)
    worker.publish("a")
    await worker.runs("a")
    worker.granted("a")
    worker.publish("b")
    await worker.runs("a")
    worker.puller.spare(0)
    await worker.runs("a")
    worker.puller.spare(None)
    await worker.runs("a", "b")
    await worker.puller.close()


# ------------------------------------------------------------------ what runs


@pytest.mark.parametrize("failure", [NotSent("away"), ValueError("unexpected")])
async def test_the_queue_is_told_of_all_jobs_as_long_as_they_run(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(ack_wait_s=0.06)
    worker.puller.pause("engine", "only what the test begins runs")
    worker.puller.start()
    bad, good = Delivered(job=job_of("bad"), error=failure), Delivered(job=job_of("good"))
    for delivery in (bad, good):
        worker.begin(delivery)
    await soon(lambda: len(good.verbs) > 1)
    assert len(bad.verbs) > 1, "one that cannot be told of does not keep the others from it"
    monkeypatch.setattr(failpoints, "_active", failpoints.parse("prefill.heartbeat=error"))
    told = len(good.verbs)
    await soon(lambda: failpoints._active["prefill.heartbeat"].hits >= 4)
    assert len(good.verbs) <= told + 1, "the failpoint keeps the queue from hearing"
    monkeypatch.setattr(failpoints, "_active", {})
    await worker.end("bad", "good")
    await worker.puller.close()


@pytest.mark.parametrize(
    ("refused", "number", "told"),
    [
        (None, 1, ["ack", 0.0]),
        (RefuseReason.IN_PROGRESS, 1, [0.0]),  # nobody would hear of it again if that worker failed
        (RefuseReason.IN_PROGRESS, 5, ["ack", 0.0]),  # it would become a dead letter
        (RefuseReason.HELD, 1, ["nak", pytest.approx(0.2)]),  # no worker has it
        (RefuseReason.HELD, 2, ["nak", pytest.approx(0.8)]),
    ],
)
async def test_a_job_of_this_process_is_not_run(
    refused: RefuseReason | None, number: int, told: list[Any]
) -> None:
    def take_back(_: object) -> bool:
        if refused is not None:
            raise ClaimRefused("another worker has it", reason=refused)
        return True

    worker, own = Worker(take_back=take_back), Delivered(number)
    worker.begin(own)
    await asyncio.wait_for(worker.puller.idle.wait(), 5)
    assert ([*own.verbs, own.delay_s], worker.puller.in_flight) == (told, 0)


async def test_a_claim_counts_until_its_answer_is_late_and_again_from_the_grant() -> None:
    budget = Budget(5000)
    budget.pulled("late", 4096)
    budget.pulled("prompt", 100)
    budget.granted("prompt")
    budget.room.clear()  # the grant wakes the puller, too
    assert (budget.tokens, budget.waiting, budget.free) == (4196, 1, 804)
    await asyncio.wait_for(budget.room.wait(), 10)
    assert budget.tokens == 100
    budget.granted("late")
    assert (budget.tokens, budget.waiting) == (4196, 0)
    budget.room.clear()
    budget.over("late", True)
    budget.over("prompt", None)
    assert budget.room.is_set(), "the puller is told"
    assert (budget.tokens, budget.completed, budget.failed) == (0, 1, 0)


async def test_a_job_that_is_late_counts_no_more_unless_each_delays_streams() -> None:
    """Jobs behind it in the queue may still be in time, and the engine computes those first."""
    budget = Budget(5000)
    for name, due_s in (("was late", -3.0), ("gets late", 0.02), ("in time", 60.0)):
        budget.pulled(name, 1000)
        budget.granted(name, due_s)
    assert budget.free == 2000
    async with asyncio.timeout(10):
        while budget.free < 4000:
            budget.room.clear()
            await budget.room.wait()
    assert (budget.free, budget.waiting) == (4000, 0)
    budget.most = 1
    assert budget.free == -2
    for name in ("was late", "gets late", "in time"):
        budget.over(name, True)
