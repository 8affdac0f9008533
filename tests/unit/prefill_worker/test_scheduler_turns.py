"""`--concurrency`: one prompt is computed, the next one's prefix is read, the last one travels."""

from __future__ import annotations

import pytest

from pullfill.prefill_worker.scheduler import Meter, PrefillScheduler
from tests.support.fakes import FakeManager, FakeRequest, FakeTransferWorker, prefill_task, step

BLOCK = 4
STEP = 2 * BLOCK


class Engine:
    """vLLM with several prompts: each step computes STEP tokens of those that may begin.

    most: of one prompt in a step, if there are others.
    steps: how many tokens of each prompt each step computed."""

    def __init__(self, concurrency: int) -> None:
        self.most = STEP - 1 if concurrency else STEP
        self.computed: list[str] = []
        self.manager = FakeManager()
        self.transfer_worker = FakeTransferWorker()
        self.side = PrefillScheduler(lambda: None, concurrency)
        self.side.bind(self.manager)
        self.requests: dict[str, FakeRequest] = {}
        self.waiting: list[str] = []
        self.reading: set[str] = set()
        self.running: list[str] = []
        self.steps: list[dict[str, int]] = []

    def add(self, name: str, tokens: int, hit: int = 0) -> None:
        blocks = -(-tokens // BLOCK)
        begin = 100 * len(self.requests) + 100
        self.requests[name] = FakeRequest(name, list(range(tokens)))
        self.manager.tables[name] = list(range(begin, begin + blocks))
        self.side.tasks[name] = task = prefill_task(
            self.transfer_worker, job_id=f"job-{name}", tokens=range(tokens), block=BLOCK, hit=hit,
            on_computed=lambda: self.computed.append(f"job-{name}"),
        )  # fmt: skip
        task.request_id = name
        self.waiting.append(name)

    def step(self) -> None:
        """One step of vLLM: running prompts first, then those that wait, in order."""
        self.reading -= self.side.before_step().loaded
        budget, scheduled = STEP, dict[str, int]()
        for name in [*self.running, *self.waiting]:
            if budget and (name in self.running or self._begins(name)):
                budget -= self._schedule(name, budget, scheduled)
        report = self.side.scheduled(step(scheduled))
        self.side.step_done()
        for name, tokens in scheduled.items():
            request = self.requests[name]
            request.num_computed_tokens += tokens
            if request.num_computed_tokens >= request.num_tokens:
                self.running.remove(name)
                self.side.finished(request)
        self.steps.append(scheduled)
        self.reading -= report.loaded

    def _begins(self, name: str) -> bool:
        """Whether a prompt that waits is computed from now on. Else its prefix may be read."""
        request = self.requests[name]
        external: int | None = 0
        if not request.num_computed_tokens:
            external, _ = self.side.matched(request, 0)
        if external is None or name in self.reading:
            return False
        self.side.allocated(request, self.manager.get_block_ids(name), external)
        if external:
            self.reading.add(name)
            request.num_computed_tokens = external
            return False
        self.waiting.remove(name)
        self.running.append(name)
        return True

    def _schedule(self, name: str, budget: int, scheduled: dict[str, int]) -> int:
        request = self.requests[name]
        scheduled[name] = min(budget, request.num_tokens - request.num_computed_tokens)
        if len(self.running) + len(self.waiting) > 1:
            scheduled[name] = min(scheduled[name], self.most)
        return scheduled[name]

    def end_read(self) -> None:
        """End the oldest read, before any write."""
        queue = self.transfer_worker.queue
        read = next(copy for copy in queue if copy.verb == "read")
        queue.remove(read)
        queue.insert(0, read)
        self.transfer_worker.finish()


def test_a_step_computes_one_prompt() -> None:
    engine = Engine(1)
    for name in "abc":
        engine.add(name, STEP + 1)
    for _ in range(6):
        engine.step()
    assert engine.steps == [{"a": 7}, {"a": 2}, {"b": 7}, {"b": 2}, {"c": 8}, {"c": 1}]
    assert engine.computed == ["job-a", "job-b", "job-c"]


def test_a_read_that_is_held_gives_no_work_until_there_is_a_turn() -> None:
    """The engine would take steps without end to hear of it."""
    engine = Engine(1)
    engine.add("a", 3 * STEP)
    engine.add("b", STEP, hit=BLOCK)
    engine.step()
    engine.end_read()
    engine.step()
    assert not engine.side.has_work
    assert engine.reading == {"b"}
    engine.step()
    engine.step()  # the last of a, which gives b its turn
    assert engine.reading == set()
    assert not engine.side.has_work
    engine.step()
    assert engine.steps[3:] == [{"a": 3}, {"b": BLOCK}]


def test_of_two_reads_that_ended_one_prompt_gets_the_turn() -> None:
    engine = Engine(1)
    engine.add("a", STEP, hit=BLOCK)
    engine.add("b", STEP, hit=BLOCK)
    engine.step()
    engine.end_read()
    engine.end_read()
    engine.step()
    engine.step()
    assert engine.steps == [{}, {"a": BLOCK}, {"b": BLOCK}]


def test_steps_that_overlap_share_their_time() -> None:
    meter = Meter()
    meter.step(100, 0.0, 1.0)
    meter.step(100, 0.5, 2.0)
    assert meter.load([], [], 2.0).tokens_per_s == pytest.approx(100)


@pytest.mark.parametrize("how", ["aborted", "preempted"])
def test_a_prompt_that_leaves_gives_its_turn_back(how: str) -> None:
    engine = Engine(1)
    engine.add("a", 3 * STEP)
    engine.add("b", STEP)
    engine.step()
    engine.running.remove("a")
    if how == "aborted":
        engine.side.tasks["a"].cancel()
        engine.side.finished(engine.requests["a"])
        del engine.side.tasks["a"]
    else:
        engine.side.scheduled(step({}, ["a"]))
    engine.step()
    assert engine.steps == [{"a": 7}, {"b": STEP}]
