"""The prefill connector's scheduler half: which blocks go out when, and who frees them."""

from __future__ import annotations

from collections.abc import Sequence

from pullfill.engine.groups import EMPTY, BlockOrder
from pullfill.errors import Fenced, HandoffError, TransferFailed
from pullfill.prefill_worker.scheduler import PrefillScheduler
from pullfill.worker.context import StepReport
from tests.support.fakes import (
    FakeManager,
    FakeRequest,
    FakeTier,
    FakeTransferWorker,
    prefill_task,
    step,
)

BLOCK = 4
REMOTE = 500
"""Decode-side block i of a task is REMOTE + i, local block i is LOCAL + i."""
LOCAL = 10


class Engine:
    """vLLM as far as one request goes: schedules chunks, keeps what it was told to keep."""

    def __init__(self, tokens: int, hit: int = 0, *, local_hit: int = 0) -> None:
        self.wakes = 0
        self.manager = FakeManager()
        self.transfer_worker = FakeTransferWorker()
        self.ends: list[BaseException | None] = []
        self.side = PrefillScheduler(self._wake)
        self.side.bind(self.manager)
        total = -(-tokens // BLOCK)
        self.task = prefill_task(
            self.transfer_worker, self.ends.append, tokens=range(tokens), block=BLOCK, hit=hit,
            blocks=range(REMOTE, REMOTE + total),
        )  # fmt: skip
        self.request = FakeRequest("j.1", self.task.token_ids)
        self.side.tasks["j.1"] = self.task
        self.manager.tables["j.1"] = [LOCAL + i for i in range(total)]
        self.local_hit = local_hit

    def _wake(self) -> None:
        self.wakes += 1

    def admit(self) -> int:
        """Ask and allocate; tokens that are being read."""
        external, asynchronous = self.side.matched(self.request, self.local_hit)
        assert asynchronous == (external > 0)
        self.side.allocated(self.request, self.manager.get_block_ids("j.1"), external)
        if not external:
            self.request.num_computed_tokens = self.local_hit
        return external

    def run(self, tokens: int, preempted: Sequence[str] = ()) -> StepReport:
        """One engine step that computes `tokens` of the request (0: only others)."""
        report = self.side.scheduled(step({"j.1": tokens} if tokens else {}, preempted))
        self.side.step_done()
        self.request.num_computed_tokens += tokens
        return report

    @property
    def written(self) -> list[int]:
        """Indices of the blocks written so far, in order."""
        log = self.transfer_worker.log
        for verb, local, remote in log:
            assert [b - LOCAL for b in local] == [b - REMOTE for b in remote]
            assert verb in {"read", "write"}
        return [b - REMOTE for verb, _, remote in log if verb == "write" for b in remote]


def test_a_failed_read_is_reported_and_the_prefix_computed_here() -> None:
    engine = Engine(4 * BLOCK, hit=2 * BLOCK)
    engine.admit()
    engine.transfer_worker.finish(TransferFailed("no"))
    assert engine.run(0).failed == {"j.1"}
    assert engine.ends == [], "the job goes on"
    assert engine.side.matched(engine.request, 0) == (0, False)
    engine.run(4 * BLOCK)
    engine.transfer_worker.flush()
    assert engine.written == [2, 3]


def test_preemption_that_cannot_be_flushed_ends_the_task() -> None:
    """Its blocks are about to be overwritten under a running copy: never commit that."""
    engine = Engine(4 * BLOCK)
    engine.admit()
    engine.run(2 * BLOCK)
    engine.transfer_worker.flush = lambda _: False  # type: ignore[method-assign]
    engine.request.num_computed_tokens = 0
    engine.run(0, preempted=["j.1"])
    assert engine.task.cancelled
    assert len(engine.ends) == 1
    assert engine.ends[0] is not None


# ------------------------------------------------------------------ who frees the blocks


def test_abort_while_reading() -> None:
    """vLLM frees when the read is reported; a `sent` besides would free twice."""
    engine = Engine(4 * BLOCK, hit=2 * BLOCK)
    engine.admit()
    engine.task.cancel()
    assert engine.side.finished(engine.request) is False
    assert len(engine.ends) == 1
    engine.side.tasks.pop("j.1")
    engine.transfer_worker.finish(Fenced("revoked"))
    report = engine.run(0)
    assert (report.failed, report.sent) == ({"j.1"}, set())
    assert engine.run(0) == StepReport()


def test_the_last_copy_ending_while_the_engine_ends_the_request() -> None:
    """The transfer worker reports on its own thread: what `finished` answers must be what it
    decided, or vLLM frees the blocks at once and is told once more."""
    engine = Engine(4 * BLOCK)
    engine.admit()
    engine.run(2 * BLOCK)
    engine.task.on_done = lambda _: engine.transfer_worker.finish()
    assert engine.side.finished(engine.request) is True
    assert engine.wakes == 0, "nobody waits for the blocks: it is told in the next step there is"
    assert engine.run(0).sent == {"j.1"}


def test_requests_of_others_are_left_alone() -> None:
    engine = Engine(BLOCK)
    stranger = FakeRequest("x", [1, 2, 3])
    assert engine.side.matched(stranger, 0) == (0, False)
    engine.side.allocated(stranger, [[1]], 0)
    assert engine.side.scheduled(step({"x": 3}, ["x"])) == StepReport()
    assert engine.side.finished(FakeRequest("x", None)) is False


# ------------------------------------------------------------------ steps that still run


def test_writes_wait_for_the_step_that_computes_them() -> None:
    """With pipeline parallelism several steps are under way: only what has run goes out."""
    engine = Engine(4 * BLOCK)
    engine.admit()
    engine.side.scheduled(step({"j.1": 2 * BLOCK}))
    engine.request.num_computed_tokens = 2 * BLOCK
    engine.side.scheduled(step({"j.1": 2 * BLOCK}))
    engine.side.step_done(2)
    assert not engine.transfer_worker.queue
    engine.side.step_done(1)
    assert [copy.local for copy in engine.transfer_worker.queue] == [[LOCAL, LOCAL + 1]]
    engine.side.step_done()
    engine.transfer_worker.flush()
    assert engine.written == [0, 1, 2, 3]
    assert engine.ends == [None]


def test_a_prefix_is_read_only_after_the_steps_that_may_still_write_into_its_blocks() -> None:
    """They were another request's, which ended while the step ran."""
    engine = Engine(4 * BLOCK, hit=2 * BLOCK)
    engine.side.scheduled(step({"other": 1}))
    engine.side.scheduled(step({"other": 1}))
    assert engine.admit() == 2 * BLOCK
    engine.side.scheduled(step({"other": 1}))
    engine.side.step_done(2)
    assert not engine.transfer_worker.queue
    assert engine.task.outstanding == 1
    engine.side.step_done(1)
    (copy,) = engine.transfer_worker.queue
    assert (copy.verb, copy.local) == ("read", [LOCAL, LOCAL + 1])
    assert copy.remote == [REMOTE, REMOTE + 1]
    assert engine.task.outstanding == 1
    engine.transfer_worker.finish()
    assert engine.run(0).loaded == {"j.1"}


def test_a_preempted_request_loses_writes_of_steps_that_still_run() -> None:
    """The step after them overwrites its blocks before they could be copied."""
    engine = Engine(4 * BLOCK)
    engine.admit()
    engine.side.scheduled(step({"j.1": 2 * BLOCK}))
    engine.request.num_computed_tokens = 0
    engine.side.scheduled(step({}, ["j.1"]))
    engine.side.step_done()
    assert not engine.transfer_worker.queue
    assert engine.task.outstanding == 0
    engine.run(4 * BLOCK)
    engine.transfer_worker.flush()
    assert engine.written == [0, 1, 2, 3]
    assert engine.ends == [None]


# ------------------------------------------------------------------ beside vLLM's own KV offloading


def engine_with(found: int | None) -> tuple[Engine, FakeTier]:
    engine, tier = Engine(6 * BLOCK, hit=4 * BLOCK, local_hit=BLOCK), FakeTier(found)
    engine.side.tier = tier  # type: ignore[assignment]
    return engine, tier


def test_what_it_has_whole_is_not_read_from_the_decode_worker() -> None:
    engine, tier = engine_with(None)
    assert engine.side.matched(engine.request, BLOCK) == (None, False), "vLLM asks again"
    tier.found = 3 * BLOCK
    assert engine.side.matched(engine.request, BLOCK) == (0, False), "vLLM asks the tier next"


def test_a_read_begins_after_the_step_that_ends_copies_from_its_blocks() -> None:
    engine, tier = engine_with(2 * BLOCK)
    assert engine.admit() == 3 * BLOCK
    assert tier.claimed >= {LOCAL + 1, LOCAL + 2, LOCAL + 3}
    assert engine.transfer_worker.queue == []
    engine.run(0)
    (copy,) = engine.transfer_worker.queue
    assert (copy.verb, copy.local) == ("read", [LOCAL + 1, LOCAL + 2, LOCAL + 3])
    engine.run(0)
    assert len(engine.transfer_worker.queue) == 1


# ------------------------------------------------------------------ windows


def test_a_block_that_the_window_has_left_behind_here_is_never_written() -> None:
    engine = Engine(6 * BLOCK)
    engine.task.written = BlockOrder((1,))
    engine.admit()
    engine.manager.tables["j.1"][4] = EMPTY
    engine.run(6 * BLOCK)
    assert engine.transfer_worker.queue == []
    (failure,) = engine.ends
    assert isinstance(failure, HandoffError)
