"""The ledger under any order of events: opens, publishes, claims, writes, deaths, deadlines.

`explore` drives the real ledger, fences and scheduler half (`HandoffModel`) with hypothesis; the
model checks its invariants after every event, and at the end that everything comes back.
"""

from __future__ import annotations

from typing import TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pullfill.decode_worker.ledger import JobState
from pullfill.errors import Outcome
from pullfill.wire import Progress, Refused
from tests.support.handoff_model import CLAIM_S, TIMEOUT_S, Grant, HandoffModel, Job

WRITERS = ("a", "b", "c")
PICK = st.integers(min_value=0, max_value=1 << 16)
MOSTLY = st.sampled_from([True, True, True, False])
SELDOM = st.sampled_from([False, False, False, True])


T = TypeVar("T")


def _newest(things: list[T], pick: int) -> T:
    return things[-1 - pick // 8 % len(things)]


class LedgerMachine(RuleBasedStateMachine):
    """Three writers that obey nothing but the fence, against one decode worker. A writer that is
    stopped is one whose batch does not end."""

    seen: set[str]

    def __init__(self) -> None:
        super().__init__()
        self.model = HandoffModel(slots=4)
        self.incarnations = ["i0"]

    @initialize(jobs=st.integers(0, 3))
    def start(self, jobs: int) -> None:
        for _ in range(jobs):
            self.model.open(2)

    # Mostly what can still move, newest first; now and then what is over, to be refused.

    def job(self, pick: int) -> Job:
        jobs = list(self.model.jobs.values())
        still = [j for j in jobs if self.model.ledger.find(j.job.job_id)]
        return _newest(still if still and pick % 8 else jobs, pick)

    def grant(self, pick: int) -> Grant:
        grants = self.model.grants
        still = [g for g in grants if self.model.is_live(g)]
        return _newest(still if still and pick % 8 else grants, pick)

    any_job = precondition(lambda self: self.model.jobs)
    any_grant = precondition(lambda self: self.model.grants)

    @rule(count=st.integers(1, 4), hits=st.integers(0, 2), extra=st.integers(1, 4), shared=MOSTLY)
    def open(self, count: int, hits: int, extra: int, shared: bool) -> None:
        if len(self.model.pool.free) >= count + hits:
            self.model.open(count, hits, extra, shared=shared)

    @any_job
    @rule(pick=PICK, outcome=st.sampled_from([None] * 7 + [Outcome.PUBLISH_FAILED]))
    def publish(self, pick: int, outcome: Outcome | None) -> None:
        job = self.job(pick)
        if not job.publish_over:
            self.model.publish(job, outcome)

    @any_job
    @rule(pick=PICK, writer=st.sampled_from(WRITERS), old=SELDOM)
    def claim(self, pick: int, writer: str, old: bool) -> None:
        stale = old and len(self.incarnations) > 1
        incarnation = self.incarnations[0] if stale else None
        answer = self.model.claim(self.job(pick), writer, incarnation)
        assert not stale or isinstance(answer, Refused)

    @any_job
    @rule(pick=PICK, writers=st.permutations(WRITERS), lost=st.booleans())
    def redeliver(self, pick: int, writers: list[str], lost: bool) -> None:
        """Two prefill workers claim the same job. The first may lose its connection afterwards."""
        job, (first, second, _) = self.job(pick), writers
        self.model.claim(job, first)
        self.model.claim(job, second)
        if lost:
            self.model.lose(first, others_alive=True)
            self.model.claim(job, second)

    @any_grant
    @rule(pick=PICK, reads=SELDOM)
    def batch(self, pick: int, reads: bool) -> None:
        """It begins, or ends if one is under way."""
        grant = self.grant(pick)
        if grant.in_batch:
            self.model.end_batch(grant)
        else:
            self.model.begin_batch(grant, reads=reads and bool(grant.hits))

    @any_grant
    @rule(pick=PICK, wrong_by=st.sampled_from([0, 0, 0, -1, 1]), forged=SELDOM, pull=st.booleans())
    def bytes_are_there(self, pick: int, wrong_by: int, forged: bool, pull: bool) -> None:
        """A ledger takes commit and ready whatever its mode: the two ways mix as they like."""
        grant, tell = self.grant(pick), self.model.ready if pull else self.model.commit
        if forged:
            assert tell(grant, writer="mallory") == "stale"
        else:
            tell(grant, wrong_by=wrong_by)

    @any_grant
    @rule(pick=PICK, forged=SELDOM)
    def progress(self, pick: int, forged: bool) -> None:
        """Its writer says that it moved: it may take longer than it had."""
        grant, ledger = self.grant(pick), self.model.ledger
        writer = "mallory" if forged else grant.writer
        ledger.progress(Progress(blocks=1, **grant.about), writer)
        entry = ledger.find(grant.job_id)
        if entry is not None and not forged and self.model._newest(grant):
            if entry.state in (JobState.GRANTED, JobState.READING):
                job, now = self.model.jobs[grant.job_id], self.model.clock.monotonic()
                job.deadline = max(job.deadline, now + TIMEOUT_S)

    @any_grant
    @rule(pick=PICK, pull=SELDOM, good=MOSTLY)
    def bring(self, pick: int, pull: bool, good: bool) -> None:
        """What a writer does that nothing happens to."""
        grant = self.grant(pick)
        if pull:
            if self.model.ready(grant) is None:
                self.model.end_read(self.model.reads[-1], good=good)
        elif grant.in_batch or self.model.begin_batch(grant):
            self.model.end_batch(grant)
            self.model.commit(grant)

    @precondition(lambda self: self.model.reads)
    @rule(pick=PICK, good=st.booleans(), over=MOSTLY)
    def end_read(self, pick: int, good: bool, over: bool) -> None:
        reads = self.model.reads
        if over:
            self.model.end_read(reads[-1 - pick % len(reads)], good=good)

    @precondition(lambda self: self.model.reads)
    @rule(pick=PICK, now=st.booleans())
    def abort_what_is_read(self, pick: int, now: bool) -> None:
        reads = self.model.reads
        job = self.model.jobs[reads[-1 - pick % len(reads)].job_id]
        if now and not job.aborted:
            self.model.abort(job)
            self.model.step()

    @any_grant
    @rule(pick=PICK, retry=MOSTLY)
    def gave_up(self, pick: int, retry: bool) -> None:
        self.model.gave_up(self.grant(pick), retry=retry)

    @any_grant
    @rule(writer=st.sampled_from(WRITERS), dies=st.booleans(), others_alive=MOSTLY)
    def lose(self, writer: str, dies: bool, others_alive: bool) -> None:
        writing = [g.writer for g in self.model.grants if g.in_batch]
        if dies:
            self.model.die(writing[-1] if writing else writer, others_alive=others_alive)
        else:
            self.model.lose(writer, others_alive=others_alive)

    @any_grant
    @rule(pick=PICK, seconds=st.sampled_from([0.05, 0.2]))
    def stops(self, pick: int, seconds: float) -> None:
        """A writer is stopped in a batch, and its silence ends its connection."""
        grant = self.grant(pick)
        if grant.in_batch or self.model.begin_batch(grant):
            self.model.lose(grant.writer, others_alive=True)
            self.model.tick(seconds)

    @any_job
    @rule(pick=PICK, now=MOSTLY)
    def abort(self, pick: int, now: bool) -> None:
        job = self.job(pick)
        if now and not job.aborted:
            self.model.abort(job)

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.01, 1.0, 1.0, CLAIM_S, TIMEOUT_S / 2, TIMEOUT_S]))
    def tick(self, seconds: float) -> None:
        self.model.tick(seconds)

    @rule()
    def step(self) -> None:
        self.model.step()

    @any_job
    @rule(now=SELDOM)
    def new_incarnation(self, now: bool) -> None:
        if not now:
            return
        self.incarnations.append(f"i{len(self.incarnations)}")
        self.model.ledger.new_incarnation(self.incarnations[-1])
        self.model.act()

    @invariant()
    def holds(self) -> None:
        self.model.check()

    def teardown(self) -> None:
        self.model.drain()
        type(self).seen |= self.model.seen


def explore(examples: int, steps: int, *, repeat: bool = True) -> set[str]:
    """Run `examples` random orders of `steps` events each. Returns the names of what happened in
    them. Raises what a check raises.

    repeat: use the same orders each time.
    """
    LedgerMachine.seen = set()
    run_state_machine_as_test(
        LedgerMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=repeat,
            print_blob=False,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
    return LedgerMachine.seen
