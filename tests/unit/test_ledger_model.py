"""The ledger under any order of events: opens, publishes, claims, writes, deaths, deadlines."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pullfill.errors import Outcome
from tests.support.handoff_model import TIMEOUT_S, Grant, HandoffModel, Job

WRITERS = ("a", "b", "c")
PICK = st.integers(min_value=0, max_value=1 << 16)


class LedgerMachine(RuleBasedStateMachine):
    """Three writers that obey nothing but the fence, against one decode worker."""

    def __init__(self) -> None:
        super().__init__()
        self.model = HandoffModel(slots=4)
        self.incarnations = ["i0"]

    def job(self, pick: int) -> Job:
        jobs = list(self.model.jobs.values())
        return jobs[-1 - pick % len(jobs)]

    def grant(self, pick: int) -> Grant:
        return self.model.grants[-1 - pick % len(self.model.grants)]

    any_job = precondition(lambda self: self.model.jobs)
    any_grant = precondition(lambda self: self.model.grants)

    @rule(count=st.integers(1, 4), hits=st.integers(0, 2), extra=st.integers(1, 4))
    def open(self, count: int, hits: int, extra: int) -> None:
        self.model.open(count, hits, extra)

    @any_job
    @rule(pick=PICK, outcome=st.sampled_from([None, None, None, Outcome.PUBLISH_FAILED]))
    def publish(self, pick: int, outcome: Outcome | None) -> None:
        job = self.job(pick)
        if not job.publish_over:
            self.model.publish(job, outcome)

    @any_job
    @rule(pick=PICK, writer=st.sampled_from(WRITERS), old=st.integers(0, 5))
    def claim(self, pick: int, writer: str, old: int) -> None:
        stale = old == 5 and len(self.incarnations) > 1
        incarnation = self.incarnations[0] if stale else None
        claimed = self.model.claim(self.job(pick), writer, incarnation)
        assert (claimed.grant is None) != (claimed.refused is None)
        assert not (stale and claimed.grant)

    @any_grant
    @rule(pick=PICK)
    def begin_batch(self, pick: int) -> None:
        grant = self.grant(pick)
        if not grant.in_batch:
            self.model.begin_batch(grant)

    @any_grant
    @rule(pick=PICK)
    def end_batch(self, pick: int) -> None:
        grant = self.grant(pick)
        if grant.in_batch:
            self.model.end_batch(grant)

    @any_grant
    @rule(pick=PICK, wrong_by=st.sampled_from([0, 0, 0, -1, 1]), forged=st.booleans())
    def commit(self, pick: int, wrong_by: int, forged: bool) -> None:
        grant = self.grant(pick)
        if forged:
            assert self.model.commit(grant, writer="mallory") == "stale"
        else:
            self.model.commit(grant, wrong_by=wrong_by)

    @any_grant
    @rule(pick=PICK, retry=st.booleans())
    def hand_back(self, pick: int, retry: bool) -> None:
        self.model.hand_back(self.grant(pick), retry=retry)

    @any_grant
    @rule(writer=st.sampled_from(WRITERS), others_alive=st.booleans())
    def lose(self, writer: str, others_alive: bool) -> None:
        self.model.lose(writer, others_alive=others_alive)

    @any_job
    @rule(pick=PICK)
    def abort(self, pick: int) -> None:
        job = self.job(pick)
        if not job.aborted:
            self.model.abort(job)

    @rule(seconds=st.sampled_from([0.0, 0.01, TIMEOUT_S / 2, TIMEOUT_S]))
    def tick(self, seconds: float) -> None:
        self.model.tick(seconds)

    @rule()
    def step(self) -> None:
        self.model.step()

    @rule()
    def new_incarnation(self) -> None:
        self.incarnations.append(f"i{len(self.incarnations)}")
        self.model.ledger.new_incarnation(self.incarnations[-1])
        self.model.act()

    @invariant()
    def holds(self) -> None:
        self.model.check()

    def teardown(self) -> None:
        self.model.drain()


LedgerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, database=None
)
TestLedgerMachine = LedgerMachine.TestCase
