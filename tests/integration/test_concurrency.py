"""`--concurrency` and `--reserve-seats`, with vLLM's own engine core and scheduler and no model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pullfill.engine.args import build_config
from pullfill.engine.host import EngineHost
from pullfill.engine.view import Seats, View
from pullfill.prefill_worker.engine import PrefillEngine
from pullfill.prefill_worker.scheduler import PrefillScheduler
from pullfill.prefill_worker.task import PrefillTask
from pullfill.prefill_worker.transfer_worker import Copy
from pullfill.transfer.shm.files import RegionFiles
from pullfill.worker import context as contexts
from pullfill.worker.context import StepReport, WorkerContext
from pullfill.worker.engine_loop import EngineLoop
from tests.support.cluster import BLOCK, FLAGS, MOCK
from tests.support.fakes import prefill_task
from tests.support.prompts import random_prompt

pytestmark = pytest.mark.engine

STEP = 512  # of FLAGS


class Copies:
    """A `TransferWorker` whose copies end on a thread of their own, as slowly as a step.

    held: reads end only after it is set."""

    held: threading.Event | None = None
    transport, why_not_better = "fake", ()

    def copy(self, copy: Copy) -> None:
        task = copy.task

        def end() -> None:
            if copy.verb == "read" and self.held is not None:
                self.held.wait(60)
            if copy.last:
                task.end(None)
            copy.done(task, None)

        threading.Timer(0.01, end).start()

    def flush(self, task: Any = None) -> bool:
        return True


@dataclass
class Prefills:
    """Runs tasks on an engine. steps: tokens of each prompt in each step that had any.

    reads: number of steps before each prefix read began.
    seats: requests that ran, and seats kept for others, when each began."""

    host: EngineHost
    scheduler: PrefillScheduler
    engine: PrefillEngine
    steps: list[dict[str, int]] = field(default_factory=list)
    reads: dict[str, int] = field(default_factory=dict)
    seats: list[tuple[int, int]] = field(default_factory=list)
    copies: Copies = field(default_factory=Copies)
    left: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def watch(self) -> None:
        side: Any = self.scheduler
        scheduled, read = side.scheduled, side.read_prefix

        def planned(output: Any) -> Any:
            if output.num_scheduled_tokens:
                self.steps.append(dict(output.num_scheduled_tokens))
            return scheduled(output)

        def began(task: PrefillTask, *rest: Any) -> None:
            self.reads[task.request_id] = len(self.steps)
            read(task, *rest)

        side.scheduled, side.read_prefix = planned, began

    def keep_seats(self, core: Any) -> None:
        """Keep seats for prefix reads, as a decode worker does for KV that it gets."""
        seats, side = Seats(core), self.scheduler
        told, read = side.before_step, side.read_prefix

        def before_step() -> StepReport:
            report = told()
            seats.leave(report.loaded)
            return report

        def began(task: PrefillTask, *rest: Any) -> None:
            seats.take(task.request_id)
            read(task, *rest)
            running = len(core.scheduler.running)
            self.seats.append((running, len(seats._taken)))

        side.before_step, side.read_prefix = before_step, began

    @contextmanager
    def together(self) -> Iterator[None]:
        """Every prompt that is submitted meanwhile arrives before the engine's next step."""
        gate = threading.Event()

        self.host.submit(lambda: gate.wait(60))
        try:
            yield
        finally:
            gate.set()

    def submit(self, name: str, tokens: int, hit: int = 0) -> None:

        def done(failure: BaseException | None) -> None:
            assert failure is None, failure
            self.engine.end(task)
            self.left.release()

        task = prefill_task(
            self.copies, done, job_id=name, tokens=random_prompt(tokens, seed=ord(name)),
            block=BLOCK, hit=hit,
        )  # fmt: skip
        task.request_id = name
        self.engine.submit(task)

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self.left.acquire(timeout=50.0), f"a prompt hangs: {self.steps}"


@contextmanager
def prefills(model: Path, concurrency: int, *flags: str) -> Iterator[Prefills]:
    """The engine of a prefill worker, without a model and without a cluster."""
    files = RegionFiles(f"concurrency-{concurrency}")
    config = build_config(
        str(model),
        [*FLAGS, *MOCK, *flags, '--additional-config={"mock": {"step_s": 0.005}}'],
        kv_role="kv_both",
        engine_id=files.instance_id,
    )
    # An engine that nobody wakes sleeps for a minute, which fails the test.
    host = EngineHost(config, log_stats=False, idle_ms=60_000)
    context, scheduler = WorkerContext("p", files), PrefillScheduler(host.wake, concurrency)
    contexts.install(context, scheduler)
    made: list[Prefills] = []
    ready = threading.Event()

    def run() -> None:
        host.build()
        life: Any = None
        scheduler.built(View(host.core))
        loop = EngineLoop(host, life, context.adapters, [scheduler])
        host.use(loop)
        engine = PrefillEngine(loop, scheduler.tasks, context, lambda _: 0)
        made.append(Prefills(host, scheduler, engine))
        made[0].watch()
        if flags:
            made[0].keep_seats(host.core)
        ready.set()
        host.loop()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(120)
        yield made[0]
    finally:
        host.stop()
        thread.join(30)
        host.shutdown()
        files.close()


@pytest.mark.essential
def test_one_prompt_in_a_step_and_the_next_prefix_meanwhile(model_path: Path) -> None:
    lengths = {"a": 3 * STEP, "b": STEP + 7, "c": 3, "d": STEP, "e": 2 * STEP + 1, "f": 40}
    hits = {"b": STEP, "d": 2 * BLOCK, "f": BLOCK}
    with prefills(model_path, 1) as made:
        with made.together():
            for name, tokens in lengths.items():
                made.submit(name, tokens, hits.get(name, 0))
        made.wait(len(lengths))
    assert [len(step) for step in made.steps] == [1] * len(made.steps)
    computed = {name: sum(step.get(name, 0) for step in made.steps) for name in lengths}
    assert computed == {name: tokens - hits.get(name, 0) for name, tokens in lengths.items()}
    # Long before the first prompt was computed, although its chunks fill whole steps.
    first = sum("a" in step for step in made.steps)
    assert first == 4
    assert all(began < first for began in made.reads.values()), made.reads
    assert made.reads.keys() == hits.keys()


@pytest.mark.essential
def test_running_and_arriving_requests_have_seats_together(model_path: Path) -> None:
    with prefills(model_path, 0, "--max-num-seqs=3") as made:
        made.copies.held = threading.Event()
        made.submit("a", 6 * STEP)
        for name in "bcdefgh":
            made.submit(name, 2 * BLOCK, BLOCK)
        made.submit("i", STEP)
        # The steps of a wait for no KV. And i, which has no KV to wait for, finds every seat taken.
        made.wait(1)
        steps = [step for step in made.steps if "a" in step]
        assert sum(step["a"] for step in steps) == 6 * STEP
        made.copies.held.set()
        made.wait(8)
    assert len(made.seats) == 7
    assert max(running + arriving for running, arriving in made.seats) == 3, made.seats
    assert all(len(step) <= 3 for step in made.steps)
