"""The handoff ledger: which prefill job may touch which blocks, and who is told what, once.

One entry per remote prefill, from `open` until it is terminal:

    QUEUED ──claim──▶ GRANTED(n) ──commit(n)──▶ COMMITTED     with digests: ──▶ VERIFYING(n),
      │                 │                                       then COMMITTED, or CLOSED: mismatch
      │                 │ revoke: fail, cancel, deadline, writer lost
      │                 ▼
      │            fence proved dead at once? ──no──▶ QUARANTINED(n)
      │                 │ yes                            │ proof
      └──cancel/─▶ CLOSED ◀──────── or back to QUEUED ◀──┘
         deadline

Two things end separately. The *request* is settled exactly once (loaded, or recompute locally); the
*blocks* go back to the pool only when the fence is proved dead (transfer/contract.py). When the
request is settled while its writer may still write, the engine is told to hold the blocks first.
A request waits for the proof for 0.1 s at most, then it is settled: recompute locally.
While a job is VERIFYING its writer is already proved quiet. So the job can end like one that nobody
claimed, and a verdict that comes later has no effect.

In pull mode the writer does not write. It says that its blocks are ready, and we read them:

    GRANTED(n) ──ready(n)──▶ READING(n) ──read──▶ as after a commit; not readable: CLOSED

A job that is given up while READING keeps its blocks held, as with any writer. The reader is a
thread of this process, so its own `read_over` is the proof that it is quiet.

Pure state: no I/O, no vLLM. Time comes from a Clock, fences from an OwnerFences. Methods may be
called from the engine thread and from the asyncio thread; each takes the one lock for
microseconds. What must be done elsewhere is queued: `take_events` for the engine thread,
`take_actions` for the asyncio thread.
"""

from __future__ import annotations

import math

from pullfill.decode_worker.arrivals import Arrivals
from pullfill.decode_worker.breaker import TRIAL_SHARE
from pullfill.decode_worker.entry import UNDER_WAY, Entry, JobState
from pullfill.decode_worker.moves import (
    Action,
    CancelMessage,
    Claimed,
    EngineEvent,
    GrantView,
    NakDelivery,
)
from pullfill.errors import Outcome, OverloadedError
from pullfill.runtime import log
from pullfill.wire import RefuseReason

__all__ = ["Entry", "JobState", "Ledger"]

logger = log.get("decode_worker.ledger")

HELD_RETRY_S = 0.05
_PROOF_SOONEST_S = 0.002
_PROOF_LATEST_S = 0.05
_LATE_S = 1.0


class Ledger(Arrivals):
    """All remote prefills of one decode worker; see `Book` for its arguments."""

    # ------------------------------------------------------------------ engine thread

    def open(
        self,
        job_id: str,
        request_id: str,
        blocks: tuple[int, ...],
        *,
        first_target: int,
        hit_tokens: int,
        timeout_s: float,
        claim_timeout_s: float | None = None,
        stall_s: float | None = None,
    ) -> None:
        """Register a job before it is published.

        Its request waits until the job is settled. So the asyncio thread is woken if it would sleep
        beyond the new deadline.

        timeout_s: most seconds for the whole job.
        claim_timeout_s: most seconds for each wait for a claim.
        stall_s: an attempt that makes progress goes on beyond timeout_s, and ends after this many
        seconds without progress. None: as timeout_s."""
        now = self._clock.monotonic()
        entry = Entry(
            job_id,
            request_id,
            blocks,
            first_target,
            hit_tokens,
            now + timeout_s,
            opened_at=now,
            claim_timeout_s=timeout_s if claim_timeout_s is None else claim_timeout_s,
            queued_at=now,
            stall_s=timeout_s if stall_s is None else stall_s,
        )
        with self._lock:
            if self.claims.queued(job_id):
                entry.claim_timeout_s *= TRIAL_SHARE
            self._jobs[job_id] = entry
            self._by_request[request_id] = job_id
            self._target_blocks += entry.targets
            self._dues.add(entry)
            earlier = entry.due < self._next_tick
            if earlier:
                self._next_tick = entry.due
        if earlier or self.tell_opens:
            self._on_action()

    def cancel(self, request_id: str) -> None:
        """The request is over in vLLM. Its job, if any is open, is closed; the request is settled
        so that vLLM frees its blocks, which are held first if a writer may still be writing."""
        with self._lock:
            entry = self._open_entry_of(request_id)
            if entry is not None:
                self._give_up(entry, Outcome.CANCELLED)
        self._wake()

    def take_events(self) -> list[EngineEvent]:
        """What the engine thread must do now, in this order. Empties the queue."""
        if not self._events:
            return []
        with self._lock:
            events = list(self._events)
            self._events.clear()
            self._told = False
        return events

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    # ------------------------------------------------------------------ publisher

    def published(self, job_id: str, receipt: object, digest: bytes) -> None:
        """The queue stored the job. If it ended meanwhile, its message is cancelled."""
        with self._lock:
            entry = self._jobs.get(job_id)
            if entry is not None and not entry.settled:
                entry.receipt, entry.digest = receipt, digest
            elif self._ended.get(job_id) is not JobState.COMMITTED:
                self._actions.append(CancelMessage(receipt))
        self._wake()

    def set_digest(self, job_id: str, digest: bytes) -> None:
        """Remember the body's digest before it is published (a claim may outrun the ack)."""
        with self._lock:
            if (entry := self._jobs.get(job_id)) is not None:
                entry.digest = digest

    def publish_failed(self, job_id: str, outcome: Outcome) -> None:
        """The queue refused or did not answer: serve locally."""
        with self._lock:
            entry = self._jobs.get(job_id)
            if entry is not None and not entry.settled:
                self._give_up(entry, outcome)
        self._wake()

    # ------------------------------------------------------------------ prefill workers

    def claim(self, job_id: str, incarnation: str, writer: str, ack_subject: str = "") -> Claimed:
        """Grant the job to a writer, or refuse. A job that another writer holds stays there.

        writer: name of a control connection."""
        try:
            with self._lock:
                return self._claim(job_id, incarnation, writer, ack_subject)
        finally:
            self._wake()

    def _claim(self, job_id: str, incarnation: str, writer: str, ack_subject: str) -> Claimed:
        if incarnation != self.incarnation:
            return Claimed(refused=RefuseReason.STALE_INCARNATION)
        entry = self._jobs.get(job_id)
        if entry is None:
            ended = self._ended.get(job_id)
            reason = RefuseReason(ended.value) if ended else RefuseReason.UNKNOWN_JOB
            return Claimed(refused=reason)
        if entry.settled:
            return Claimed(refused=RefuseReason.CLOSED)
        if entry.state is JobState.GRANTED and entry.writer == writer:
            return Claimed(refused=RefuseReason.HELD, retry_after_s=1.0)
        if entry.state in UNDER_WAY:
            # A claim never takes a job from its holder. A holder that is gone or silent loses its
            # connection, and `writer_lost` takes the job from it.
            return Claimed(refused=RefuseReason.IN_PROGRESS)
        if entry.state is JobState.QUARANTINED:
            return Claimed(refused=RefuseReason.HELD, retry_after_s=HELD_RETRY_S)
        now = self._clock.monotonic()
        if now >= entry.due:
            self._expire(entry)
            return Claimed(refused=RefuseReason.CLOSED)
        try:
            fence = self._fences.open(entry.blocks, entry.first_target)
        except OverloadedError:
            return Claimed(refused=RefuseReason.HELD, retry_after_s=1.0)
        self.claims.claimed()
        entry.attempt += 1
        entry.written = 0
        entry.state, entry.writer, entry.fence = JobState.GRANTED, writer, fence
        entry.ack_subject = ack_subject
        return Claimed(
            grant=GrantView(
                entry.attempt,
                entry.deadline - now,
                entry.digest,
                fence,
                now - entry.opened_at,
                self.kv_digest,
                self.kv_mode,
            )
        )

    def gave_up(
        self, job_id: str, attempt: int, incarnation: str, writer: str, cause: str, retry: bool
    ) -> None:
        """The writer gives up and is quiet: try another worker, or serve locally."""
        with self._lock:
            entry = self._current(job_id, attempt, incarnation, writer)
            if entry is not None and entry.state is JobState.GRANTED:
                if retry:
                    self._revoke(entry, cause, requeue=True)
                else:
                    self._give_up(entry, Outcome.PREFILL_FAILED)
        self._wake()

    def writer_lost(self, writer: str, *, others_alive: bool) -> None:
        """Handle the end of a control connection.

        The blocks of its jobs stay held until the writer is proved quiet.

        If another prefill worker is connected, the jobs of this one go back to the queue. We hand
        their deliveries back, because the prefill worker may be dead.

        If no other is connected, every open job is served locally, even if nobody had claimed it.
        To wait for a worker that may never come would cost each job its whole deadline."""
        with self._lock:
            for entry in list(self._jobs.values()):
                if entry.state in (JobState.READING, JobState.VERIFYING):
                    # We still read from the lost writer's memory. If that fails, the prompt is
                    # computed here. So no other writer is needed, and the message is removed: the
                    # lost writer cannot ack it.
                    if entry.writer == writer:
                        self._forget_message(entry)
                    continue
                if not others_alive:
                    if not entry.settled:
                        self._give_up(entry, Outcome.PREFILL_LOST)
                    continue
                if entry.state is not JobState.GRANTED or entry.writer != writer:
                    continue
                ack_subject = entry.ack_subject
                self._revoke(entry, Outcome.PREFILL_LOST, requeue=True)
                if not entry.settled and ack_subject:
                    self._actions.append(NakDelivery(ack_subject, entry.receipt))
        self._wake()

    # ------------------------------------------------------------------ time

    def tick(self) -> float | None:
        """Give up what is past its deadline and ask again for proofs. Returns seconds until the
        next call is useful, None when nothing is open."""
        now = self._clock.monotonic()
        with self._lock:
            for entry in self._dues.past(now):
                self._expire(entry)
            for entry in list(self._quarantined.values()):
                if entry.state is JobState.QUARANTINED:
                    self._ask_proof(entry)
            due = self._dues.soonest()
            soonest = None if due is None else due - now
            for entry in self._quarantined.values():
                # A running batch ends within milliseconds, a stopped writer maybe never.
                waited = (now - entry.quarantined_at) / 8
                again = min(max(waited, _PROOF_SOONEST_S), _PROOF_LATEST_S)
                soonest = again if soonest is None else min(soonest, again)
            self._next_tick = math.inf if soonest is None else now + soonest
        self._wake()
        return soonest

    @property
    def overdue(self) -> bool:
        """Whether `tick` is called much later than it asked for: its thread hangs, and another one
        must do it (docs/failure-modes.md)."""
        return self._clock.monotonic() > self._next_tick + _LATE_S

    def tick_overdue(self) -> None:
        """Call `tick` if it is overdue. An error is logged, and the next call tries again."""
        if self.overdue:
            try:
                self.tick()
            except Exception:
                logger.exception("a tick of the ledger failed; the next one tries again")

    def give_up_all(self, outcome: Outcome, *, but_granted: bool = False) -> None:
        """Serve every open job locally; `but_granted`: those under way may end."""
        with self._lock:
            for entry in list(self._jobs.values()):
                under_way = entry.state in UNDER_WAY
                if not entry.settled and not (but_granted and under_way):
                    self._give_up(entry, outcome)
        self._wake()

    def prefill_works(self) -> None:
        """Note that a connected prefill worker computes, for this decode worker or another."""
        with self._lock:
            self.claims.moving()

    def prefill_joined(self) -> None:
        """Note that a prefill worker has connected, or pulls again. Ends the breaker's pause."""
        with self._lock:
            self.claims.retry()

    def new_incarnation(self, incarnation: str) -> None:
        """Refuse every claim and commit made for the old one; open jobs are served locally."""
        self.give_up_all(Outcome.PREFILL_LOST)
        with self._lock:
            self.incarnation = incarnation

    # ------------------------------------------------------------------ views

    def take_actions(self) -> list[Action]:
        """What the asyncio thread must send. Empties the queue."""
        if not self._actions:
            return []
        with self._lock:
            actions = list(self._actions)
            self._actions.clear()
        return actions

    def counts(self) -> dict[JobState, int]:
        """Open jobs by state."""
        with self._lock:
            states = [entry.state for entry in self._jobs.values()]
        return {state: states.count(state) for state in JobState}

    @property
    def quarantined_blocks(self) -> int:
        """Blocks whose writer was told to stop and is not proved quiet."""
        if not self._quarantined:
            return 0
        with self._lock:
            return sum(len(entry.blocks) for entry in self._quarantined.values())

    @property
    def target_blocks(self) -> int:
        """Blocks that open jobs bind: they are written, or held, for some prefill worker."""
        return self._target_blocks

    def find(self, job_id: str) -> Entry | None:
        return self._jobs.get(job_id)

    @property
    def waiting_requests(self) -> int:
        """Number of requests that wait for a job. A settled job may be open for its blocks only."""
        with self._lock:
            return sum(not entry.settled for entry in self._jobs.values())

    def queued(self) -> tuple[int, int]:
        """Number of jobs that nobody has claimed, and of the blocks that they wait for."""
        if not self._jobs:
            return 0, 0
        with self._lock:
            targets = [e.targets for e in self._jobs.values() if e.state is JobState.QUEUED]
        return len(targets), sum(targets)

    def unwritten(self) -> int:
        """Number of blocks that are not written yet, over all jobs that prefill workers hold."""
        if not self._jobs:
            return 0
        with self._lock:
            held = [e for e in self._jobs.values() if e.state is JobState.GRANTED]
            return sum(max(0, e.targets - e.written) for e in held)

    @property
    def open_jobs(self) -> int:
        return len(self._jobs)
