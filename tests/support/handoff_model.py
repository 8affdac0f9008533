"""A decode worker's handoff without vLLM or network: the real ledger, fences and scheduler half.

`HandoffModel` plays vLLM (allocates, frees on a report) and any number of writers, and checks after
each move what must always hold. Driven by the state machine and the directed tests of the ledger.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

from pullfill.decode_worker.handoff import OpenedJob
from pullfill.decode_worker.ledger import (
    UNDER_WAY,
    CancelMessage,
    EngineEvent,
    Entry,
    JobState,
    Ledger,
    NakDelivery,
    Settle,
    Sums,
)
from pullfill.decode_worker.request_trace import RequestTraces
from pullfill.decode_worker.scheduler import DecodeScheduler, JobBlocks
from pullfill.errors import Fenced, Outcome
from pullfill.wire import (
    Commit,
    FenceToken,
    GiveUp,
    Ready,
    Refused,
    RefuseReason,
    RouterConfig,
    RouterPolicy,
)
from tests.support import said
from tests.support.fakes import FakeClock, FakePool, FakeRequest, situation, unmeasured
from tests.support.loopback import LoopbackFences

BLOCK = 4
NUM_BLOCKS = 40
TIMEOUT_S = 30.0
CLAIM_S = 10.0
PROOF_S = 0.1
"""Seconds between two requests for a proof, at most. A writer's last batch takes less, so nothing
waits longer for a proof."""
PREFIX = (0, 1)
"""Blocks that some other request keeps in the prefix cache; shared hits point here."""


@dataclass(slots=True)
class Grant:
    job_id: str
    writer: str
    attempt: int
    incarnation: str
    token: FenceToken
    hits: frozenset[int]
    targets: frozenset[int]
    in_batch: bool = False
    reads: bool = False
    """What the batch does: reads the hits, or writes the targets."""
    let_go: Callable[[], None] = lambda: None
    """Ends the batch's hold of its fence."""

    @property
    def about(self) -> dict[str, Any]:
        """Fields of every message of its writer."""
        return {"job_id": self.job_id, "attempt": self.attempt, "incarnation": self.incarnation}


@dataclass(slots=True)
class Job:
    job: Entry
    hits: int
    targets: int
    request: FakeRequest
    blocks: list[int]
    deadline: float
    stored: bool = False
    cancelled_in_queue: bool = False
    publish_over: bool = False
    aborted: bool = False
    committed: bool = False
    reports: list[bool] = field(default_factory=list)
    freed: bool = False


class Watched(Ledger):
    """Remembers how each request ended."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.outcomes: list[tuple[str, Outcome]] = []

    def take_events(self) -> list[EngineEvent]:
        events = super().take_events()
        self.outcomes += [(e.request_id, e.outcome) for e in events if isinstance(e, Settle)]
        return events


class HandoffModel:
    """One decode worker. Every method is one atomic event; `check` after each."""

    def __init__(self, *, slots: int = 8) -> None:
        self.clock = FakeClock()
        self.pool = FakePool(NUM_BLOCKS)
        self.pool.touch([self.pool.blocks[b] for b in PREFIX])
        self.fences = LoopbackFences(slots)
        self.ledger = Watched(self.fences, incarnation="i0", clock=self.clock)
        self.jobs: dict[str, Job] = {}
        self.grants: list[Grant] = []
        self.naks: list[str] = []
        self.reads: list[Entry] = []
        """Under way: our reader writes into these blocks, whatever the ledger believes."""
        self.seen: set[str] = set()
        """What happened here at least once: says whether an exploration reached it."""
        self._opened: list[OpenedJob] = []
        self._serial = 0
        traces = RequestTraces("decode-1", self.clock)
        config = RouterConfig(
            policy=RouterPolicy.ALWAYS_REMOTE,
            remote_timeout_s=TIMEOUT_S,
            claim_timeout_s=CLAIM_S,
        )
        blocks = JobBlocks(BLOCK, self.pool)
        self.side = DecodeScheduler(
            blocks,
            self.ledger,
            situation=lambda r, h: situation(r, h, config, traces),
            publish=self._opened.append,
            traces=traces,
            meter=unmeasured(),
            instance_id="decode-1",
            compat_hash="c",
        )

    # ------------------------------------------------------------------ vLLM and its connector

    def open(self, targets: int, hits: int = 0, extra: int = 1, *, shared: bool = True) -> Job:
        """A request of `targets` remote blocks; the last holds `extra` tokens. shared: another
        request has the hits as well, so they outlive this one."""
        prefix = PREFIX[: hits if shared else 0]
        own = self.pool.allocate(targets + hits - len(prefix))
        self.pool.touch([self.pool.blocks[b] for b in prefix])
        blocks = [*prefix, *own]
        tokens = (len(blocks) - 1) * BLOCK + extra + 1
        self._serial += 1
        request = FakeRequest(f"r{self._serial}", list(range(tokens)))
        external, asynchronous = self.side.decide(request, hits * BLOCK)
        assert asynchronous
        assert external == tokens - 1 - hits * BLOCK
        self.side.enqueue(request, [blocks], external)
        self.side.step_done()
        entry = self._opened.pop().entry
        assert not self._opened
        job = Job(entry, hits, targets, request, blocks, self.clock.monotonic() + TIMEOUT_S)
        self.jobs[entry.job_id] = job
        self.check()
        return job

    def step(self) -> None:
        """vLLM schedules: the connector's reports arrive and free what waited for them."""
        loaded = self.side.finish()
        later, failed = self.side.collect()
        loaded += later
        for request_id in [*loaded, *failed]:
            (job,) = [j for j in self.jobs.values() if j.request.request_id == request_id]
            job.reports.append(request_id in loaded)
            assert len(job.reports) == 1, "a request is told once"
            if job.aborted or request_id in failed:
                self._free(job)
        self.check()

    def abort(self, job: Job) -> None:
        """The request ends in vLLM. While it waits its blocks stay until the report."""
        job.aborted = True
        self.side.request_finished(job.request)
        if job.reports:
            self._free(job)
        self.act()

    def _free(self, job: Job) -> None:
        if not job.freed:
            job.freed = True
            self.pool.release(reversed(job.blocks))

    # ------------------------------------------------------------------ queue and network

    def publish(self, job: Job, outcome: Outcome | None = None) -> None:
        """The publish ends: stored, or failed with `outcome`."""
        job.publish_over = True
        if outcome is None:
            job.stored = True
            self.ledger.set_digest(job.job.job_id, b"digest")
            self.ledger.published(job.job, job.job.job_id)
        else:
            self.ledger.give_up(job.job.job_id, outcome)
        self.act()

    def act(self) -> None:
        """What the control server does with the ledger's actions."""
        for action in self.ledger.take_actions():
            match action:
                case CancelMessage(receipt):
                    self.jobs[str(receipt)].cancelled_in_queue = True
                case NakDelivery(subject, _):
                    self.naks.append(subject)
        self.check()

    # ------------------------------------------------------------------ writers

    def claim(self, job: Job, writer: str, incarnation: str | None = None) -> Any:
        """Returns the answer: the wire's `Grant`, or `Refused`."""
        incarnation = incarnation or self.ledger.incarnation
        entry = job.job
        holder = (entry.writer, entry.attempt) if entry.state in UNDER_WAY else None
        answer = said.grant(self.ledger, job.job.job_id, incarnation, writer, f"ack.{writer}")
        if holder is not None:
            assert entry.state in UNDER_WAY, "a claim took the job from its holder"
            assert (entry.writer, entry.attempt) == holder
        if isinstance(answer, Refused):
            self.seen.add(f"claim {answer.reason}")
            assert answer.retry_after_s is None or answer.reason is RefuseReason.HELD
        else:
            blocks = entry.blocks
            self.seen |= {"claim granted", f"attempt {answer.attempt}"}
            self.grants.append(
                Grant(
                    job.job.job_id, writer, answer.attempt, incarnation, answer.fence,
                    frozenset(blocks[: job.hits]), frozenset(blocks[job.hits :]),
                )
            )  # fmt: skip
        self.act()
        return answer

    def begin_batch(self, grant: Grant, *, reads: bool = False) -> bool:
        """Start writing, as a session does, or reading the hits. False: fenced."""
        try:
            grant.let_go = self.fences.hold(grant.token)
        except Fenced:
            self.seen.add("read fenced" if reads else "write fenced")
            return False
        grant.in_batch, grant.reads = True, reads
        assert self._newest(grant), "an old attempt still moves bytes"
        if reads:
            self.seen.add("prefix read")
        self.seen.add(f"{sum(g.in_batch for g in self.grants)} batches at once")
        self.check()
        return True

    def _newest(self, grant: Grant) -> bool:
        return grant.attempt == max(g.attempt for g in self.grants if g.job_id == grant.job_id)

    def end_batch(self, grant: Grant) -> None:
        assert grant.in_batch
        grant.let_go()
        grant.in_batch = False

    def commit(self, grant: Grant, *, wrong_by: int = 0, writer: str | None = None) -> str | None:
        job = self.jobs[grant.job_id]
        told = said.blank(Commit, blocks=job.targets + wrong_by, **grant.about)
        why = self.ledger.commit(told, writer or grant.writer)
        self.seen.add(f"commit {why if isinstance(why, str) else 'accepted'}")
        if why is None:
            self._check_accepted(grant, wrong_by)
            job.committed = True
        self.act()
        return why

    def _check_accepted(self, grant: Grant, wrong_by: int) -> None:
        assert self._newest(grant), "a stale attempt is accepted"
        assert not self.jobs[grant.job_id].committed, "committed twice"
        assert wrong_by == 0
        assert not grant.in_batch

    def ready(self, grant: Grant, *, wrong_by: int = 0, writer: str | None = None) -> str | None:
        """Pull: the writer says that we may read. None: our reader has begun."""
        ids = bytes(4 * (self.jobs[grant.job_id].targets + wrong_by))
        told = said.blank(Ready, block_ids=ids, **grant.about)
        answer = self.ledger.ready(told, writer or grant.writer)
        self.seen.add(f"ready {answer if isinstance(answer, str) else 'accepted'}")
        if isinstance(answer, Entry):
            self._check_accepted(grant, wrong_by)
            assert set(answer.blocks[answer.first_target :]) == grant.targets
            self.reads.append(answer)
        self.act()
        return answer if isinstance(answer, str) else None

    def end_read(self, read: Entry, *, good: bool) -> str | None:
        """Our reader is done, however late."""
        self.reads.remove(read)
        why = self.ledger.read_over(read, good=good)
        self.seen.add(f"read {why if isinstance(why, str) else 'accepted'}")
        if why is None:
            assert good, "bytes that could not be read are used"
            self.jobs[read.job_id].committed = True
        self.act()
        return why

    def gave_up(self, grant: Grant, *, retry: bool) -> None:
        told = GiveUp(cause="why", retry=retry, **grant.about)
        self.ledger.gave_up(told, grant.writer)
        self.act()

    def lose(self, writer: str, *, others_alive: bool) -> None:
        """The connection ends; a batch of the writer may go on all the same."""
        entries = [job.job for job in self.jobs.values()]
        others = [e for e in entries if e.state is JobState.GRANTED and e.writer != writer]
        self.ledger.writer_lost(writer)
        if others_alive:
            assert all(entry.state is JobState.GRANTED for entry in others), "they are alive"
        else:
            for entry in others:
                self.ledger.writer_lost(entry.writer)
            self.ledger.give_up_all(Outcome.PREFILL_LOST, but_granted=True)
            waiting = [entry for entry in entries if not entry.settled]
            assert all(e.state is JobState.READING for e in waiting), "waits for nobody"
        self.act()

    def die(self, writer: str, *, others_alive: bool) -> None:
        """The writer's process is gone, wherever it was: the kernel lets go of its locks."""
        for grant in self.grants:
            if grant.writer == writer and grant.in_batch:
                self.seen.add("died in a batch")
                self.end_batch(grant)
        self.lose(writer, others_alive=others_alive)

    def tick(self, seconds: float = 0.0) -> float | None:
        self.clock.advance(seconds)
        soonest = self.ledger.tick()
        self._check_timer(math.inf if soonest is None else soonest)
        self.act()
        return soonest

    # ------------------------------------------------------------------ what always holds

    def is_live(self, grant: Grant) -> bool:
        """Whether its fence is not proved dead."""
        return self.fences.granted(grant.token, writes=False) is not None

    def check(self) -> None:
        """What holds after every event."""
        live = [g.targets for g in self.grants if self.is_live(g)]
        assert len(live) == self.fences.in_use, "a fence is in use that nobody was granted"
        union: set[int] = set()
        for targets in live:
            assert not union & targets, "two writers hold one block"
            union |= targets
        assert not union & self.pool.free, "a block that may still be written is free"
        for grant in self.grants:
            # Who reads a prefix under a fence that was not proved dead believes what he read.
            if self.is_live(grant) or (grant.in_batch and grant.reads):
                assert not grant.hits & self.pool.free, "a block that may still be read is free"
            if grant.in_batch and not grant.reads:
                self._check_lands(grant.job_id, grant.targets)
        for read in self.reads:
            targets = set(read.blocks[read.first_target :])
            assert not targets & union, "a writer holds what we read into"
            self._check_lands(read.job_id, targets)
        if self.ledger.quarantined_blocks:
            self.seen.add("quarantined")
        for job in self.jobs.values():
            if job.reports and job.reports[0]:
                assert job.committed, "loaded without a commit"
        jobs = [entry for job_id in self.jobs if (entry := self.ledger.find(job_id))]
        assert self.ledger.sums() == Sums(
            Counter(entry.state for entry in jobs),
            queued_tokens=sum(e.tokens for e in jobs if e.state is JobState.QUEUED),
            uncomputed=sum(entry.uncomputed for entry in jobs),
            unwritten=sum(entry.unwritten for entry in jobs),
            targets=sum(entry.targets for entry in jobs),
        )

    def _check_lands(self, owner: str, targets: Set[int]) -> None:
        """Bytes land in these blocks right now, whatever the ledger believes."""
        assert not targets & self.pool.free, "bytes land in free blocks"
        for job_id, job in self.jobs.items():
            if job_id != owner and not job.freed:
                assert not targets & set(job.blocks), "bytes land in another's blocks"

    def _check_timer(self, soonest: float) -> None:
        """The next tick, in `soonest` seconds, comes in time for every open job."""
        now = self.clock.monotonic()
        for job in self.jobs.values():
            entry = job.job
            if not entry.settled:
                due = min(entry.due, job.deadline)
                assert now < due, "waits although its time is up"
                assert soonest <= due - now, "nobody looks in time"
            if entry.state is JobState.QUARANTINED:
                waited_s = now - entry.quarantined_at
                assert entry.settled or waited_s < PROOF_S, "a request waits for a stopped writer"
                assert soonest <= PROOF_S, "nobody asks for the proof"

    def drain(self) -> None:
        """Writers fall quiet, time passes, requests end: jobs, blocks and fences must come back."""
        for job in self.jobs.values():
            if not job.publish_over:
                self.publish(job)
        for grant in self.grants:
            if grant.in_batch:
                self.end_batch(grant)
        self.tick(TIMEOUT_S + 1)
        for read in list(self.reads):
            assert self.end_read(read, good=True) == "stale"
        self.step()
        for job in self.jobs.values():
            assert len(job.reports) == 1, f"{job.request.request_id} was told {job.reports}"
            if not job.freed:
                self.abort(job)
            if job.stored and not job.committed:
                assert job.cancelled_in_queue, "the message of a closed job stays in the queue"
        assert self.ledger.open_jobs == 0
        assert self.ledger.quarantined_blocks == 0
        assert self.fences.in_use == 0
        assert self.pool.free == set(range(NUM_BLOCKS)) - set(PREFIX)
        assert not self.ledger.has_events
        assert not self.ledger.take_actions()
        assert self.ledger.tick() is None
        self.seen |= {f"ended {outcome}" for _, outcome in self.ledger.outcomes}
        ended = sorted(request_id for request_id, _ in self.ledger.outcomes)
        assert ended == sorted(j.request.request_id for j in self.jobs.values()), "one for each job"


def granted(model: HandoffModel) -> tuple[Job, Grant]:
    """Open and publish a job; writer `a` claims it."""
    job = model.open(2, 1)
    model.publish(job)
    assert model.claim(job, "a").fence
    return job, model.grants[-1]
