"""The pull loop: a job starts when it comes, and the next is asked for at once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pullfill.deploy.plan import PREFILL_CHUNK
from pullfill.errors import QueueUnavailable
from pullfill.prefill_worker.puller import Puller, budget_of
from pullfill.prefill_worker.transfer_worker import Credits
from pullfill.queue.contract import QueueConfig, Urgency
from pullfill.testing.memory_queue import MemoryQueue
from tests.support.nats import until


class Runner:
    """Counts what is under way."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.in_flight_tokens = 0
        self.waiting = 0
        self.uncomputed = 0

    @property
    def in_flight(self) -> int:
        return len(self.started)

    def start(self, delivery: Any) -> None:
        self.started.append(delivery.job_id)
        self.in_flight_tokens += delivery.tokens
        self.uncomputed += 1


class Consumer:
    """A consumer that notes how much it was asked for."""

    def __init__(self, real: Any, runner: Runner) -> None:
        self._real, self._runner = real, runner
        self.asked: list[int] = []

    async def pull(self, wait_s: float, **how: bool) -> Any:
        if not how["urgent_only"]:
            self.asked.append(len(self._runner.started))
        return await self._real.pull(wait_s, **how)

    async def drain(self) -> None:
        await self._real.drain()


async def started(runner: Runner, count: int) -> None:
    """Until so many jobs are, and until what would start another had time for it."""
    async with asyncio.timeout(20.0):
        while len(runner.started) < count:  # noqa: ASYNC110 - nothing to wait on
            await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)


async def test_each_job_starts_before_the_next_is_asked_for() -> None:
    queue, runner = MemoryQueue(QueueConfig("test", "c")), Runner()
    producer = queue.producer()
    for number in range(4):
        await producer.publish(f"j{number}", b"", 10)
    consumer: Any = Consumer(queue.consumer(), runner)
    fake: Any = SimpleNamespace(runner=runner)
    puller = Puller(consumer, fake.runner, budget_tokens=30, max_jobs=32, credits=Credits(1 << 20))
    puller.start()
    await started(runner, 3)
    await puller.stop()
    assert consumer.asked == [0, 1, 2], "then the budget is used up"
    assert runner.started == ["j0", "j1", "j2"]


@pytest.mark.parametrize(("step", "budget"), [(1024, 4096), (2048, 4096), (8192, 16384)])
def test_the_budget_is_two_steps_but_not_of_small_ones(step: int, budget: int) -> None:
    assert budget_of(step) == budget


async def test_small_steps_do_not_leave_the_engine_without_a_second_prompt() -> None:
    """3000 tokens are three steps of a prefill worker on CPU: the next prompt is there before the
    last of them."""
    queue, runner = MemoryQueue(QueueConfig("test", "c")), Runner()
    producer = queue.producer()
    for number in range(3):
        await producer.publish(f"j{number}", b"", 3000)
    fake: Any = runner
    budget = budget_of(PREFILL_CHUNK)
    puller = Puller(
        queue.consumer(), fake, budget_tokens=budget, max_jobs=32, credits=Credits(1 << 20)
    )
    puller.start()
    await started(runner, 2)
    await puller.stop()
    assert runner.started == ["j0", "j1"], "and the third is for other workers"


async def test_a_tight_job_goes_past_the_prompt_that_waits_in_the_engine() -> None:
    """Beyond the budget, once over. Others wait for room, and so does a tight one without need."""
    queue, runner = MemoryQueue(QueueConfig("test", "c")), Runner()
    producer = queue.producer()
    fake: Any = runner
    puller = Puller(
        queue.consumer(), fake, budget_tokens=1000, max_jobs=32, credits=Credits(1 << 20)
    )
    puller.start()
    await producer.publish("one", b"", 1000)
    await started(runner, 1)
    await producer.publish("two", b"", 10)
    await producer.publish("tight", b"", 10, Urgency.TIGHT)
    await asyncio.sleep(0.05)
    assert runner.started == ["one"], "it would gain nothing: the engine has no second prompt"
    runner.in_flight_tokens = 0
    puller.changed()
    await started(runner, 3)
    await producer.publish("big", b"", 1000)
    await started(runner, 4)
    await producer.publish("next", b"", 10)
    for number in range(3):
        await producer.publish(f"tight{number}", b"", 600, Urgency.TIGHT)
    await started(runner, 6)
    await asyncio.sleep(0.05)
    await puller.stop()
    assert runner.started == ["one", "tight", "two", "big", "tight0", "tight1"]


async def test_with_concurrency_one_more_prompt_is_pulled_than_is_computed() -> None:
    """Of any length. KV that travels does not count, up to the most jobs at once."""
    queue, runner = MemoryQueue(QueueConfig("test", "c")), Runner()
    producer = queue.producer()
    for number in range(6):
        await producer.publish(f"j{number}", b"", 1_000_000)
    fake: Any = runner
    puller = Puller(
        queue.consumer(), fake, budget_tokens=1, max_jobs=4, credits=Credits(1 << 20), concurrency=1
    )
    puller.start()
    await started(runner, 2)
    assert runner.started == ["j0", "j1"]
    runner.uncomputed -= 1
    puller.changed()
    await started(runner, 3)
    assert runner.started == ["j0", "j1", "j2"]
    runner.uncomputed = 0
    puller.changed()
    await started(runner, 4)
    await puller.stop()
    assert runner.started == ["j0", "j1", "j2", "j3"], "and no more: it has four"


async def test_a_pause_ends_the_pull_that_waits() -> None:
    """Five workers that pause would otherwise make a dead letter of the next job."""
    queue, runner = MemoryQueue(QueueConfig("test", "c")), Runner()
    producer, consumer = queue.producer(), Consumer(queue.consumer(), runner)
    either: Any = SimpleNamespace(consumer=consumer, runner=runner)
    puller = Puller(
        either.consumer, either.runner, budget_tokens=30, max_jobs=32, credits=Credits(1 << 20)
    )
    puller.start()
    await until(lambda: bool(consumer.asked))
    for paused in (True, False, True):
        puller.pause(paused)
    await asyncio.sleep(0.02)
    await producer.publish("j", b"", 10)
    await asyncio.sleep(0.02)
    job = await queue.consumer().pull(20.0)
    assert job.number == 1
    await job.nak()
    puller.pause(False)
    await started(runner, 1)
    await puller.stop()
    assert runner.started == ["j"]


async def test_jobs_are_left_to_workers_that_wait_and_taken_if_none_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pullfill.prefill_worker.puller._LEAVE_S", 60.0)  # ended below
    queue, runner = MemoryQueue(QueueConfig("test", "c")), Runner()
    producer, consumer = queue.producer(), cast(Any, Consumer(queue.consumer(), runner))
    pull, waits = consumer.pull, list[float]()

    async def noting(wait_s: float, **how: Any) -> Any:
        waits.append(wait_s)
        return await pull(wait_s, **how)

    consumer.pull = noting
    puller = Puller(
        consumer, cast(Any, runner), budget_tokens=30, max_jobs=32, credits=Credits(1 << 20)
    )
    puller.start()
    await until(lambda: bool(waits))
    puller.leave_to_others()
    puller.leave_to_others()
    await until(lambda: len(waits) > 3)
    await producer.publish("j", b"", 1)
    await started(runner, 1)
    assert waits[0] > 0
    assert not any(waits[1:])
    puller._leave_until = asyncio.get_running_loop().time()
    await until(lambda: waits[-1] > 0)
    await puller.stop()


async def test_a_pause_after_a_pull_that_failed_ends_like_any_other() -> None:
    queue, runner = MemoryQueue(QueueConfig("test", "c")), Runner()
    producer, consumer = queue.producer(), cast(Any, Consumer(queue.consumer(), runner))
    fail, pull = asyncio.Event(), consumer.pull

    async def fails_once(*args: Any, **how: Any) -> Any:
        if not fail.is_set():
            fail.set()
            raise QueueUnavailable("NATS is away")
        return await pull(*args, **how)

    consumer.pull = fails_once
    puller = Puller(
        consumer, cast(Any, runner), budget_tokens=30, max_jobs=32, credits=Credits(1 << 20)
    )
    puller.start()
    await fail.wait()
    puller.pause(True)
    puller.pause(False)
    await producer.publish("j", b"", 1)
    await started(runner, 1)
    await puller.stop()
