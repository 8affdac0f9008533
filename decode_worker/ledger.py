"""The ledger: the state machine of every remote prefill of one decode worker.

    open ──▶ QUEUED ──grant──▶ GRANTED(n) ──commit(n)──▶ COMMITTED
               │                 │
               │                 │ revoke: given up, cancelled, deadline, writer lost
               │                 ▼
               │            fence proved dead at once? ──no──▶ QUARANTINED(n)
               │                 │ yes                            │ proof
               └──cancel/─▶ CLOSED ◀──────── or back to QUEUED ◀──┘
                  deadline

    --kv-mode pull:  GRANTED(n) ──ready(n)──▶ READING(n) ──read_over──▶ COMMITTED, or CLOSED

n is the attempt: it counts the grants of a job.

What always holds:

- A request is settled exactly once: either its KV is loaded, or its prompt is computed here.
- The blocks of a job are free only when its writer is proved quiet (transfer/contract.py). Time is
  no proof. If the request is settled before that, the engine is told to hold the blocks first.
- A request waits for that proof for NO_PROOF_S at most.
- One writer holds a job at a time. No claim takes a job from its holder.
- The writer of a READING job is our own reader. `read_over` is the proof that it is quiet.

Locks: the engine thread and the asyncio thread both call the ledger. One lock guards all of it, for
microseconds: nothing here does I/O or knows vLLM. Methods that begin with an underscore, and
`on_outcome`, are called with the lock held; `on_event` and `on_action` without it. What other
threads must do is queued: `take_events` for the engine thread, `take_actions` for the asyncio one.
"""

from __future__ import annotations

import math

from pullfill.decode_worker.breaker import TRIAL_SHARE
from pullfill.decode_worker.ledger_jobs import OpenJobs, locked
from pullfill.decode_worker.ledger_types import (
    UNDER_WAY,
    CancelMessage,
    Claimed,
    Entry,
    GrantView,
    JobState,
    NakDelivery,
    Read,
)
from pullfill.engine.groups import ONE_TABLE, BlockOrder
from pullfill.errors import Outcome, OverloadedError
from pullfill.wire import RefuseReason

_HELD_RETRY_S = 0.05
_NO_SLOT_RETRY_S = 1.0


class Ledger(OpenJobs):
    """All remote prefills of one decode worker.

    kv_mode: how the KV gets into the blocks. Grants tell it to the prefill worker.
    on_event: called after an event was queued for the engine thread. It must only wake that thread.
    on_action: the same for actions and the asyncio thread.
    on_outcome: called each time that a request is settled.
    tell_opens: wake the asyncio thread on every open, not only when the next deadline moves
    earlier. Set while no prefill worker pulls.
    target_blocks: number of blocks that open jobs bind. Prefill workers write to them, or they are
    held.
    """

    # ------------------------------------------------------------------ open

    def open(
        self,
        job_id: str,
        request_id: str,
        blocks: tuple[int, ...],
        *,
        first_target: int,
        timeout_s: float,
        order: BlockOrder = ONE_TABLE,
        hit_tokens: int = 0,
        tokens: int = 0,
        claim_timeout_s: float | None = None,
        hedge_s: float | None = None,
        stall_s: float | None = None,
        later: bool = False,
    ) -> None:
        """Register a job before it is published. Its request waits until the job is settled.

        timeout_s: most seconds for the whole job.
        order, hit_tokens: see `Entry`.
        tokens: number of tokens to compute.
        claim_timeout_s: most seconds for each wait for a claim. None: as timeout_s.
        hedge_s: if nobody claims the job within so many seconds, the prompt is computed here, even
        if claim_timeout_s is longer. None: claim_timeout_s alone counts.
        stall_s: an attempt that makes progress goes on beyond timeout_s, and ends after this many
        seconds without progress. None: as timeout_s.
        later: the job waits for something before it is published. claim_timeout_s counts only from
        `set_digest` on."""
        now = self._clock.monotonic()
        entry = Entry(
            job_id,
            request_id,
            blocks,
            first_target,
            opened_at=now,
            queued_at=math.inf if later else now,
            deadline=now + timeout_s,
            claim_timeout_s=timeout_s if claim_timeout_s is None else claim_timeout_s,
            stall_s=timeout_s if stall_s is None else stall_s,
            hedge_at=math.inf if hedge_s is None else now + hedge_s,
            order=order,
            hit_tokens=hit_tokens,
            tokens=tokens,
        )
        with self._lock:
            if not entry.self_check and self.claims.queued(job_id):
                entry.claim_timeout_s *= TRIAL_SHARE
            self._jobs[job_id] = entry
            self._by_request[request_id] = job_id
            self.target_blocks += entry.targets
            self._totals.count(entry)
            earlier = self._dues.watch(entry)
        if earlier or self.tell_opens:
            self._on_action()

    def set_digest(self, job_id: str, digest: bytes, features: bytes = b"") -> None:
        """Remember the digest of the body that is about to be published, and what a grant brings.

        A claim may come before `published` is called. So if the job was opened with `later`, its
        wait for a claim begins here."""
        with self._lock:
            if (entry := self._jobs.get(job_id)) is None:
                return
            entry.digest, entry.features = digest, features
            if entry.published:
                return
            entry.queued_at = self._clock.monotonic()
            earlier = self._dues.watch(entry)
        if earlier:
            self._on_action()

    @locked
    def published(self, job_id: str, receipt: object, digest: bytes) -> None:
        """Note that the queue has stored the job. If the job has ended, its message is deleted."""
        entry = self._jobs.get(job_id)
        if entry is not None and not entry.settled:
            entry.receipt, entry.digest = receipt, digest
        elif not self.was_committed(job_id):
            self._actions.append(CancelMessage(receipt))

    @locked
    def publish_failed(self, job_id: str, outcome: Outcome) -> None:
        """Serve the request locally: the queue has refused the job, or did not answer."""
        entry = self._jobs.get(job_id)
        if entry is not None and not entry.settled:
            self._give_up(entry, outcome)

    @locked
    def take_back(self, job_id: str) -> bool:
        """Serve the request of a queued job locally: our own prefill side has pulled the job.

        Returns False if a prefill worker has the job, or may still write to its blocks. Then the
        request still waits for the job."""
        entry = self._jobs.get(job_id)
        if entry is None or entry.settled:
            return True
        if entry.state is JobState.QUEUED:
            self._give_up(entry, Outcome.OWN_JOB)
        return entry.settled

    # ------------------------------------------------------------------ grant

    @locked
    def grant(self, job_id: str, incarnation: str, writer: str, ack_subject: str = "") -> Claimed:
        """Answer a claim: grant the job to the writer, or refuse.

        writer: name of the control connection that claims.
        ack_subject: of the delivery that brought the job. Empty: of none."""
        if incarnation != self.incarnation:
            return Claimed(refused=RefuseReason.STALE_INCARNATION)
        entry = self._jobs.get(job_id)
        if entry is None:
            ended = self._ended.get(job_id)
            reason = RefuseReason(ended.value) if ended else RefuseReason.UNKNOWN_JOB
            return Claimed(refused=reason)
        if (refusal := self._refuse(entry, writer)) is not None:
            return refusal
        try:
            fence = self._fences.open(entry.blocks, entry.first_target)
        except OverloadedError:
            return Claimed(refused=RefuseReason.HELD, retry_after_s=_NO_SLOT_RETRY_S)
        if not entry.self_check:
            self.claims.claimed()
        entry.attempt += 1
        entry.written = 0
        entry.writer, entry.fence, entry.ack_subject = writer, fence, ack_subject
        self._enter(entry, JobState.GRANTED)
        entry.granted_at = now = self._clock.monotonic()
        return Claimed(
            GrantView(
                entry.attempt,
                entry.deadline - now,
                entry.digest,
                fence,
                now - entry.opened_at,
                self.kv_mode,
                entry.features,
            )
        )

    def _refuse(self, entry: Entry, writer: str) -> Claimed | None:
        """Why the writer cannot have this open job now. None: it can."""
        if entry.settled:
            return Claimed(refused=RefuseReason.CLOSED)
        if entry.state is JobState.GRANTED and entry.writer == writer:
            return Claimed(refused=RefuseReason.HELD, retry_after_s=_NO_SLOT_RETRY_S)
        if entry.state in UNDER_WAY:
            # A holder that is gone or silent loses its connection. Then `writer_lost` takes the
            # job from it.
            return Claimed(refused=RefuseReason.IN_PROGRESS)
        if entry.state is JobState.QUARANTINED:
            return Claimed(refused=RefuseReason.HELD, retry_after_s=_HELD_RETRY_S)
        if self._clock.monotonic() >= entry.due:
            self._expire(entry)
            return Claimed(refused=RefuseReason.CLOSED)
        return None

    def _current(self, job_id: str, attempt: int, incarnation: str, writer: str) -> Entry | None:
        """The job, if the writer speaks of the attempt that it was granted last."""
        entry = self._jobs.get(job_id)
        if entry is None or incarnation != self.incarnation:
            return None
        return entry if (entry.attempt, entry.writer) == (attempt, writer) else None

    # ------------------------------------------------------------------ progress

    def progress(
        self, job_id: str, attempt: int, incarnation: str, writer: str, blocks: int = 0
    ) -> None:
        """Note that the current attempt has made progress. Its job gets `stall_s` from now.

        So a deadline that was estimated too short does not end an attempt that makes progress.

        blocks: number of blocks written since the last report."""
        with self._lock:
            entry = self._current(job_id, attempt, incarnation, writer)
            if entry is not None and entry.state in (JobState.GRANTED, JobState.READING):
                entry.written += blocks
                self._totals.count(entry)
                entry.deadline = max(entry.deadline, self._clock.monotonic() + entry.stall_s)

    # ------------------------------------------------------------------ commit, or ready and read

    @locked
    def commit(
        self,
        job_id: str,
        attempt: int,
        incarnation: str,
        writer: str,
        blocks: int,
    ) -> str | None:
        """Accept the bytes of the current attempt.

        Returns None if they are accepted: the request is settled as loaded. Otherwise returns the
        reason for the refusal. A stale commit changes nothing.

        blocks: number of blocks that were written."""
        entry = self._current(job_id, attempt, incarnation, writer)
        if entry is None or entry.state is not JobState.GRANTED:
            return "stale"
        if (why := self._take_over(entry, blocks)) is None:
            self._loaded(entry)
        return why

    @locked
    def ready(
        self, job_id: str, attempt: int, incarnation: str, writer: str, blocks: int
    ) -> Read | str:
        """Let our reader read what the current attempt has computed.

        Returns a `Read`, or the reason for the refusal, as `commit` does."""
        entry = self._current(job_id, attempt, incarnation, writer)
        if entry is None or entry.state is not JobState.GRANTED:
            return "stale"
        if (why := self._take_over(entry, blocks)) is not None:
            return why
        entry.reading = True
        self._enter(entry, JobState.READING)
        return Read(job_id, attempt, entry.blocks[entry.first_target :])

    @locked
    def read_over(self, job_id: str, attempt: int, *, good: bool) -> str | None:
        """Note that our reader has ended. It never touches the blocks again. Answers as `commit`.

        good: whether it has read all blocks. If not, the prompt is computed here: no other prefill
        worker has the KV."""
        entry = self._jobs.get(job_id)
        assert entry is not None, "a job that is read stays open"
        assert entry.reading, "read twice"
        assert entry.attempt == attempt, "nobody can claim a job that is read"
        entry.reading = False
        if entry.state is JobState.QUARANTINED:  # the job ended meanwhile
            self._ask_proof(entry)
            return "stale"
        if good:
            self._loaded(entry)
            return None
        self._give_up(entry, Outcome.PREFILL_FAILED)
        return "read_failed"

    def _take_over(self, entry: Entry, blocks: int) -> str | None:
        """The writer says that its part is done. None: so it is, and the writer is proved quiet.

        Otherwise returns the reason. The request is then served locally."""
        if blocks != entry.targets:
            self._give_up(entry, Outcome.REJECTED)
            return "wrong_block_count"
        assert entry.fence is not None
        if not self._proved(entry.fence):
            # It claims to be done and still writes: nothing of it can be trusted.
            self._give_up(entry, Outcome.REJECTED)
            return "writer_not_quiet"
        entry.fence = None
        return None

    def _loaded(self, entry: Entry) -> None:
        """All bytes are in the blocks."""
        self._settle(entry, Outcome.COMMITTED)
        self._close(entry, JobState.COMMITTED)

    # ------------------------------------------------------------------ give up

    @locked
    def gave_up(
        self, job_id: str, attempt: int, incarnation: str, writer: str, cause: str, retry: bool
    ) -> None:
        """Handle a writer that gives its attempt up and is quiet.

        retry: let another prefill worker try. Otherwise the request is served locally."""
        entry = self._current(job_id, attempt, incarnation, writer)
        if entry is None or entry.state is not JobState.GRANTED:
            return
        if retry:
            self._revoke(entry, cause, requeue=True)
        else:
            self._give_up(entry, Outcome.PREFILL_FAILED)

    @locked
    def writer_lost(self, writer: str, *, others_alive: bool) -> None:
        """Handle the end of a control connection. Its blocks are held until the writer is quiet.

        others_alive: another prefill worker is connected, so the jobs of this one go back to the
        queue. If none is, every open job is served locally, also one that nobody has claimed: to
        wait for a worker that may never come would cost each job its whole deadline."""
        for entry in list(self._jobs.values()):
            if entry.state is JobState.READING:
                # The KV is computed. If it cannot be read, the prompt is computed here. So no other
                # writer is needed, and the lost one cannot ack the message.
                if entry.writer == writer:
                    self._forget_message(entry)
            elif not others_alive:
                if not entry.settled:
                    self._give_up(entry, Outcome.PREFILL_LOST)
            elif entry.state is JobState.GRANTED and entry.writer == writer:
                ack_subject, entry.losses = entry.ack_subject, entry.losses + 1
                self._revoke(entry, Outcome.PREFILL_LOST, requeue=True)
                if not entry.settled and ack_subject:
                    # The lost worker may be dead, so we nak its delivery.
                    self._actions.append(NakDelivery(ack_subject, entry.receipt))
