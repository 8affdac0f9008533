"""The ledger: the state machine of every remote prefill of one decode worker.

    open ──▶ QUEUED ──grant──▶ GRANTED(n) ──commit(n)──▶ COMMITTED
               │                 │
               │                 │ revoke: given up, cancelled, deadline, writer lost
               │                 ▼
               │            fence proved dead at once? ──no──▶ QUARANTINED(n)
               │                 │ yes                            │ proof
               └──cancel/─▶ CLOSED ◀──────── or back to QUEUED ◀──┘
                  deadline

    --kv-digest:     GRANTED(n) ──commit(n)──▶ VERIFYING(n) ──verified──▶ COMMITTED, or CLOSED
    --kv-mode pull:  GRANTED(n) ──ready(n)──▶ READING(n) ──read_over──▶ as after a commit

n is the attempt: it counts the grants of a job.

What always holds:

- A request is settled exactly once: either its KV is loaded, or its prompt is computed here.
- The blocks of a job are free only when its writer is proved quiet (transfer/contract.py). Time is
  no proof. If the request is settled before that, the engine is told to hold the blocks first.
- A request waits for that proof for NO_PROOF_S at most.
- One writer holds a job at a time. No claim takes a job from its holder.
- The writer of a VERIFYING job is proved quiet. So the job can end like one that nobody claimed,
  and a verdict that comes later has no effect.
- The writer of a READING job is our own reader. `read_over` is the proof that it is quiet.

Locks: the engine thread and the asyncio thread both call the ledger. One lock guards all of it, for
microseconds: nothing here does I/O or knows vLLM. Methods that begin with an underscore, and
`on_outcome`, are called with the lock held; `on_event` and `on_action` without it. What other
threads must do is queued: `take_events` for the engine thread, `take_actions` for the asyncio one.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.decode_worker.breaker import TRIAL_SHARE, ClaimBreaker
from pullfill.decode_worker.ledger_types import (
    UNDER_WAY,
    Action,
    CancelMessage,
    Claimed,
    EngineEvent,
    Entry,
    GrantView,
    Hold,
    JobState,
    NakDelivery,
    Read,
    Release,
    SendRevoke,
    Settle,
    Verify,
)
from pullfill.engine.groups import ONE_TABLE, BlockOrder
from pullfill.errors import Outcome, OverloadedError
from pullfill.runtime import log
from pullfill.transfer.contract import OwnerFences
from pullfill.wire import DigestMode, KvMode, RefuseReason

logger = log.get("decode_worker.ledger")

_REMEMBERED = 16_384
_HELD_RETRY_S = 0.05
_NO_SLOT_RETRY_S = 1.0
_PROOF_SOONEST_S = 0.002
_PROOF_LATEST_S = 0.05
_LATE_S = 1.0
_FEW_DUES = 1024

P = ParamSpec("P")
T = TypeVar("T")


def _locked(method: Callable[Concatenate[Ledger, P], T]) -> Callable[Concatenate[Ledger, P], T]:
    """Call the method with the lock held. Then wake the threads that have something to take."""

    @wraps(method)
    def call(self: Ledger, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with self._lock:
                return method(self, *args, **kwargs)
        finally:
            self._wake()

    return call


class Ledger:
    """All remote prefills of one decode worker.

    kv_digest: which of the written blocks must be verified before the request is told.
    kv_mode: how the KV gets into the blocks. Grants tell it to the prefill worker.
    on_event: called after an event was queued for the engine thread. It must only wake that thread.
    on_action: the same for actions and the asyncio thread.
    on_outcome: called each time that a request is settled.
    tell_opens: wake the asyncio thread on every open, not only when the next deadline moves
    earlier. Set while no prefill worker pulls.
    target_blocks: number of blocks that open jobs bind. Prefill workers write to them, or they are
    held.
    """

    def __init__(
        self,
        fences: OwnerFences,
        *,
        incarnation: str,
        max_attempts: int = 3,
        kv_digest: DigestMode = DigestMode.OFF,
        kv_mode: KvMode = KvMode.PUSH_ASYNC,
        clock: Clock = SYSTEM_CLOCK,
        on_event: Callable[[], None] = lambda: None,
        on_action: Callable[[], None] = lambda: None,
        on_outcome: Callable[[Entry, Outcome], None] = lambda _e, _o: None,
    ) -> None:
        self._fences = fences
        self._clock = clock
        self._max_attempts = max_attempts
        self.kv_digest = kv_digest
        self.kv_mode = kv_mode
        self.incarnation = incarnation
        self.tell_opens = True
        self.claims = ClaimBreaker(clock)
        self._lock = threading.Lock()
        self._jobs: dict[str, Entry] = {}
        self._by_request: dict[str, str] = {}
        self._ended: OrderedDict[str, JobState] = OrderedDict()
        # Kept beside `_jobs`, so that a decision and a tick cost the same however many jobs wait.
        self._quarantined: dict[str, Entry] = {}
        self.target_blocks = 0
        self._dues: list[tuple[float, int, Entry]] = []
        self._dues_serial = itertools.count()
        self._sweep_dues_at = _FEW_DUES
        self._next_tick = math.inf
        self._events: deque[EngineEvent] = deque()
        self._actions: deque[Action] = deque()
        self._told = False
        self._on_event = on_event
        self._on_action = on_action
        self._on_outcome = on_outcome

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
    ) -> None:
        """Register a job before it is published. Its request waits until the job is settled.

        timeout_s: most seconds for the whole job.
        order, hit_tokens: see `Entry`.
        tokens: number of tokens to compute.
        claim_timeout_s: most seconds for each wait for a claim. None: as timeout_s.
        hedge_s: if nobody claims the job within so many seconds, the prompt is computed here, even
        if claim_timeout_s is longer. None: claim_timeout_s alone counts.
        stall_s: an attempt that makes progress goes on beyond timeout_s, and ends after this many
        seconds without progress. None: as timeout_s."""
        now = self._clock.monotonic()
        entry = Entry(
            job_id,
            request_id,
            blocks,
            first_target,
            opened_at=now,
            queued_at=now,
            deadline=now + timeout_s,
            claim_timeout_s=timeout_s if claim_timeout_s is None else claim_timeout_s,
            stall_s=timeout_s if stall_s is None else stall_s,
            hedge_at=math.inf if hedge_s is None else now + hedge_s,
            order=order,
            hit_tokens=hit_tokens,
            tokens=tokens,
        )
        with self._lock:
            if self.claims.queued(job_id):
                entry.claim_timeout_s *= TRIAL_SHARE
            self._jobs[job_id] = entry
            self._by_request[request_id] = job_id
            self.target_blocks += entry.targets
            self._watch_due(entry)
            earlier = entry.due < self._next_tick
            if earlier:
                self._next_tick = entry.due
        if earlier or self.tell_opens:
            self._on_action()  # the asyncio thread would sleep beyond the new deadline

    def set_digest(self, job_id: str, digest: bytes, features: bytes = b"") -> None:
        """Remember the digest of the body that is about to be published, and what a grant brings.

        A claim may come before `published` is called."""
        with self._lock:
            if (entry := self._jobs.get(job_id)) is not None:
                entry.digest, entry.features = digest, features

    @_locked
    def published(self, job_id: str, receipt: object, digest: bytes) -> None:
        """Note that the queue has stored the job. If the job has ended, its message is deleted."""
        entry = self._jobs.get(job_id)
        if entry is not None and not entry.settled:
            entry.receipt, entry.digest = receipt, digest
        elif self._ended.get(job_id) is not JobState.COMMITTED:
            self._actions.append(CancelMessage(receipt))

    @_locked
    def publish_failed(self, job_id: str, outcome: Outcome) -> None:
        """Serve the request locally: the queue has refused the job, or did not answer."""
        entry = self._jobs.get(job_id)
        if entry is not None and not entry.settled:
            self._give_up(entry, outcome)

    @_locked
    def take_back(self, job_id: str) -> None:
        """Serve the request of a queued job locally: our own prefill side has pulled the job."""
        entry = self._jobs.get(job_id)
        if entry is not None and not entry.settled and entry.state is JobState.QUEUED:
            self._give_up(entry, Outcome.OWN_JOB)

    # ------------------------------------------------------------------ grant

    @_locked
    def grant(self, job_id: str, incarnation: str, writer: str, ack_subject: str = "") -> Claimed:
        """Answer a claim: grant the job to the writer, or refuse.

        writer: name of the control connection that claims.
        ack_subject: of the delivery that brought the job. Empty if it came past the stream."""
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
        self.claims.claimed()
        entry.attempt += 1
        entry.written = 0
        entry.state, entry.writer, entry.fence = JobState.GRANTED, writer, fence
        entry.ack_subject = ack_subject
        entry.granted_at = now = self._clock.monotonic()
        return Claimed(
            GrantView(
                entry.attempt,
                entry.deadline - now,
                entry.digest,
                fence,
                now - entry.opened_at,
                self.kv_digest,
                self.kv_mode,
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
                entry.deadline = max(entry.deadline, self._clock.monotonic() + entry.stall_s)

    # ------------------------------------------------------------------ commit, or ready and read

    @_locked
    def commit(
        self,
        job_id: str,
        attempt: int,
        incarnation: str,
        writer: str,
        blocks: int,
        digest: bytes | None = None,
    ) -> Verify | str | None:
        """Accept the bytes of the current attempt.

        Returns None if they are accepted: the request is settled as loaded. Returns a `Verify` if
        they must be checked first. Otherwise returns the reason for the refusal. A stale commit
        changes nothing.

        blocks: number of blocks that were written."""
        entry = self._current(job_id, attempt, incarnation, writer)
        if entry is None or entry.state is not JobState.GRANTED:
            return "stale"
        return self._take_over(entry, blocks) or self._arrived(entry, digest)

    @_locked
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
        entry.state, entry.reading = JobState.READING, True
        return Read(job_id, attempt, entry.blocks[entry.first_target :])

    @_locked
    def read_over(
        self, job_id: str, attempt: int, *, good: bool, digest: bytes | None = None
    ) -> Verify | str | None:
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
            return self._arrived(entry, digest)
        self._give_up(entry, Outcome.PREFILL_FAILED)
        return "read_failed"

    @_locked
    def verified(self, job_id: str, attempt: int, *, good: bool) -> str | None:
        """Note whether the bytes of a commit equal their digest. Answers as `commit`."""
        entry = self._jobs.get(job_id)
        if entry is None or entry.state is not JobState.VERIFYING:
            return "stale"
        assert entry.attempt == attempt, "nobody can claim a job that is verified"
        if not good:
            self._give_up(entry, Outcome.DIGEST_MISMATCH)
            return Outcome.DIGEST_MISMATCH.value
        self._loaded(entry)
        return None

    def _take_over(self, entry: Entry, blocks: int) -> str | None:
        """The writer says that its part is done. None: so it is, and the writer is proved quiet.

        Otherwise returns the reason. The request is then served locally."""
        if blocks != entry.targets:
            self._give_up(entry, Outcome.REJECTED)
            return "wrong_block_count"
        assert entry.fence is not None
        if not self._fences.try_revoke(entry.fence):
            # It claims to be done and still writes: nothing of it can be trusted.
            self._give_up(entry, Outcome.REJECTED)
            return "writer_not_quiet"
        entry.fence = None
        return None

    def _arrived(self, entry: Entry, digest: bytes | None) -> Verify | None:
        """All bytes are in the blocks: settle the request, or verify the bytes first."""
        if self.kv_digest is DigestMode.OFF:
            self._loaded(entry)
            return None
        entry.state = JobState.VERIFYING
        blocks = entry.blocks[entry.first_target :]
        what = blocks, entry.order, entry.hit_tokens, entry.tokens
        return Verify(
            entry.job_id, entry.attempt, *what, self.kv_digest, entry.digest, digest or b""
        )

    def _loaded(self, entry: Entry) -> None:
        self._settle(entry, Outcome.COMMITTED)
        self._close(entry, JobState.COMMITTED)

    # ------------------------------------------------------------------ give up

    @_locked
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

    @_locked
    def writer_lost(self, writer: str, *, others_alive: bool) -> None:
        """Handle the end of a control connection. Its blocks are held until the writer is quiet.

        others_alive: another prefill worker is connected, so the jobs of this one go back to the
        queue. If none is, every open job is served locally, also one that nobody has claimed: to
        wait for a worker that may never come would cost each job its whole deadline."""
        for entry in list(self._jobs.values()):
            if entry.state in (JobState.READING, JobState.VERIFYING):
                # The KV is computed. If it cannot be read or is wrong, the prompt is computed here.
                # So no other writer is needed, and the lost one cannot ack the message.
                if entry.writer == writer:
                    self._forget_message(entry)
            elif not others_alive:
                if not entry.settled:
                    self._give_up(entry, Outcome.PREFILL_LOST)
            elif entry.state is JobState.GRANTED and entry.writer == writer:
                ack_subject = entry.ack_subject
                self._revoke(entry, Outcome.PREFILL_LOST, requeue=True)
                if not entry.settled and ack_subject:
                    # The lost worker may be dead, so we nak its delivery.
                    self._actions.append(NakDelivery(ack_subject, entry.receipt))

    @_locked
    def cancel(self, request_id: str) -> None:
        """Close the job of a request that is over in vLLM, if one is open.

        The request is settled all the same, so that vLLM frees its blocks."""
        entry = self._jobs.get(self._by_request.get(request_id, ""))
        if entry is not None and not entry.settled:
            self._give_up(entry, Outcome.CANCELLED)

    @_locked
    def give_up_all(self, outcome: Outcome, *, but_granted: bool = False) -> None:
        """Serve every open job locally.

        but_granted: let those end that a prefill worker computes or has computed."""
        for entry in list(self._jobs.values()):
            if not entry.settled and not (but_granted and entry.state in UNDER_WAY):
                self._give_up(entry, outcome)

    def new_incarnation(self, incarnation: str) -> None:
        """Refuse every claim and commit of the old incarnation. Open jobs are served locally."""
        self.give_up_all(Outcome.PREFILL_LOST)
        with self._lock:
            self.incarnation = incarnation

    def _give_up(self, entry: Entry, outcome: Outcome) -> None:
        """Settle the request without the remote result, and close the job."""
        if entry.state is JobState.GRANTED or entry.reading:
            self._revoke(entry, outcome, requeue=False)
        if not entry.settled:
            if entry.state is JobState.QUARANTINED:
                entry.held = True
                self._events.append(Hold(entry.job_id, entry.blocks))
            self._settle(entry, outcome)
        self._forget_message(entry)
        if entry.state in (JobState.QUEUED, JobState.READING, JobState.VERIFYING):
            self._close(entry, JobState.CLOSED)  # nobody can write to its blocks

    def _forget_message(self, entry: Entry) -> None:
        """Take the job out of the queue: no prefill worker is needed any more."""
        if entry.receipt is not None:
            self._actions.append(CancelMessage(entry.receipt))
            entry.receipt = None

    # ------------------------------------------------------------------ revoke, quarantine

    def _revoke(self, entry: Entry, reason: str, *, requeue: bool) -> None:
        """Take the grant back. The job is QUEUED if its writer is proved quiet, else QUARANTINED.

        requeue: the request waits for the proof and another claim. It is served locally after the
        last attempt."""
        entry.state = JobState.QUARANTINED
        self._quarantined[entry.job_id] = entry
        entry.quarantined_at = self._clock.monotonic()
        self._actions.append(SendRevoke(entry.writer, entry.job_id, entry.attempt, str(reason)))
        self._ask_proof(entry)
        if requeue and entry.attempt >= self._max_attempts and not entry.settled:
            self._give_up(entry, Outcome.PREFILL_FAILED)
        elif requeue and entry.state is JobState.QUARANTINED:
            self._watch_due(entry)

    def _ask_proof(self, entry: Entry) -> bool:
        """Whether nobody can write to the blocks any more. Then the job is QUEUED, or closed."""
        if entry.reading:
            return False
        if entry.fence is not None and not self._fences.try_revoke(entry.fence):
            return False
        entry.fence, entry.writer = None, ""
        entry.state, entry.queued_at = JobState.QUEUED, self._clock.monotonic()
        self._quarantined.pop(entry.job_id, None)
        if entry.held:
            entry.held = False
            self._events.append(Release(entry.job_id))
        if entry.settled:
            self._close(entry, JobState.CLOSED)
        else:
            self._watch_due(entry)
        return True

    # ------------------------------------------------------------------ settle, close

    def _settle(self, entry: Entry, outcome: Outcome) -> None:
        assert not entry.settled, "a request is settled once"
        entry.settled = True
        self.claims.ended(entry.job_id)
        loaded = outcome is Outcome.COMMITTED
        self._events.append(Settle(entry.request_id, loaded, outcome))
        self._on_outcome(entry, outcome)

    def _close(self, entry: Entry, state: JobState) -> None:
        entry.state = state
        if self._jobs.pop(entry.job_id, None) is not None:
            self.target_blocks -= entry.targets
        self._quarantined.pop(entry.job_id, None)
        if self._by_request.get(entry.request_id) == entry.job_id:
            del self._by_request[entry.request_id]
        self._ended[entry.job_id] = state
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    # ------------------------------------------------------------------ time

    @_locked
    def tick(self) -> float | None:
        """Give up what is past its deadline, and ask again for proofs.

        Returns the seconds until the next call is useful. None: nothing is open."""
        now = self._clock.monotonic()
        while (due := self._soonest_due()) is not None and due <= now:
            self._expire(heapq.heappop(self._dues)[2])
        for entry in list(self._quarantined.values()):
            if entry.state is JobState.QUARANTINED:
                self._ask_proof(entry)
        due = self._soonest_due()
        soonest = math.inf if due is None else due - now
        for entry in self._quarantined.values():
            # A running batch ends within milliseconds, a stopped writer maybe never.
            waited = (now - entry.quarantined_at) / 8
            soonest = min(soonest, max(waited, _PROOF_SOONEST_S), _PROOF_LATEST_S)
        self._next_tick = now + soonest
        return None if soonest == math.inf else soonest

    @property
    def overdue(self) -> bool:
        """Whether `tick` is called much later than it asked for. Then its thread hangs, and another
        thread must call it (docs/failure-modes.md)."""
        return self._clock.monotonic() > self._next_tick + _LATE_S

    def tick_overdue(self) -> None:
        """Call `tick` if it is overdue. An error is logged, and the next call tries again."""
        if self.overdue:
            try:
                self.tick()
            except Exception:
                logger.exception("a tick of the ledger failed; the next one tries again")

    def _expire(self, entry: Entry) -> None:
        """The job has been in its state for too long. The outcome tells which state that was."""
        if entry.state is JobState.QUEUED:
            if entry.due == entry.hedge_at:
                self._give_up(entry, Outcome.HEDGED)
            else:
                self._nobody_claimed(entry)
            return
        outcome = Outcome.TIMEOUT
        if entry.state is JobState.QUARANTINED:
            if self._ask_proof(entry):
                return  # proved in the last moment: the job waits for another claim
            if self._clock.monotonic() < entry.deadline:
                outcome = Outcome.QUARANTINED
        self._give_up(entry, outcome)

    def _nobody_claimed(self, entry: Entry) -> None:
        """Serve the job locally. If that opens the breaker, do so with every queued job."""
        opens = self.claims.timed_out(entry.job_id, entry.queued_at)
        self._give_up(entry, Outcome.CLAIM_TIMEOUT)
        for other in list(self._jobs.values()) if opens else ():
            if other.state is JobState.QUEUED and not other.settled:
                self._give_up(other, Outcome.CLAIMS_STALLED)

    # `_dues` is a heap of (due, serial, entry). A job whose due time moves later is not looked for
    # in it: `_soonest_due` puts it back when its old time comes up. So neither an open, nor a
    # grant, nor a tick costs more because thousands of jobs wait.

    def _watch_due(self, entry: Entry) -> None:
        """Call it for a job that is new, or whose due time has moved earlier."""
        heapq.heappush(self._dues, (entry.due, next(self._dues_serial), entry))
        if len(self._dues) > self._sweep_dues_at:
            self._dues = [item for item in self._dues if not item[2].settled]
            heapq.heapify(self._dues)
            self._sweep_dues_at = max(_FEW_DUES, 2 * len(self._dues))

    def _soonest_due(self) -> float | None:
        """When the first job of `_dues` is due. None if there is no job."""
        while self._dues:
            due, _, entry = self._dues[0]
            if entry.settled:
                heapq.heappop(self._dues)
            elif entry.due > due:
                heapq.heapreplace(self._dues, (entry.due, next(self._dues_serial), entry))
            else:
                return due
        return None

    # ------------------------------------------------------------------ other threads

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take_events(self) -> list[EngineEvent]:
        """What the engine thread must do now, in this order. Empties the queue."""
        if not self._events:
            return []
        with self._lock:
            events = list(self._events)
            self._events.clear()
            self._told = False
        return events

    def take_actions(self) -> list[Action]:
        """What the asyncio thread must send. Empties the queue."""
        if not self._actions:
            return []
        with self._lock:
            actions = list(self._actions)
            self._actions.clear()
        return actions

    def _wake(self) -> None:
        """Wake the threads for which something is queued. Called without the lock."""
        with self._lock:
            # Once for all events that the engine thread has not taken: a wake-up costs more than
            # the rest of a grant.
            tell = bool(self._events) and not self._told
            self._told = self._told or tell
        if tell:
            self._on_event()
        if self._actions:
            self._on_action()

    def prefill_free(self) -> None:
        """Note that a prefill worker has connected, pulls again, or has no more jobs.

        Ends the breaker's pause."""
        with self._lock:
            self.claims.retry()

    # ------------------------------------------------------------------ views

    def find(self, job_id: str) -> Entry | None:
        return self._jobs.get(job_id)

    @property
    def open_jobs(self) -> int:
        return len(self._jobs)

    @property
    def waiting_requests(self) -> int:
        """Number of requests that wait for a job. A settled job may be open for its blocks only."""
        with self._lock:
            return sum(not entry.settled for entry in self._jobs.values())

    def oldest(self, limit: int) -> tuple[float, list[Entry]]:
        """Return the time, and the first jobs that were opened. Read them at once."""
        with self._lock:
            return self._clock.monotonic(), list(itertools.islice(self._jobs.values(), limit))

    def counts(self) -> dict[JobState, int]:
        """Number of open jobs in each state."""
        with self._lock:
            states = [entry.state for entry in self._jobs.values()]
        return {state: states.count(state) for state in JobState}

    def queued(self) -> tuple[int, int]:
        """Number of jobs that nobody has claimed, and of the tokens to compute for them."""
        if not self._jobs:
            return 0, 0
        with self._lock:
            tokens = [e.tokens for e in self._jobs.values() if e.state is JobState.QUEUED]
        return len(tokens), sum(tokens)

    def uncomputed(self) -> int:
        """Number of tokens that prefill workers have still to compute, over all open jobs."""
        if not self._jobs:
            return 0
        with self._lock:
            return round(sum(e.uncomputed for e in self._jobs.values()))

    def unwritten(self) -> int:
        """Number of blocks that are not written yet, over all jobs that prefill workers hold."""
        if not self._jobs:
            return 0
        with self._lock:
            held = [e for e in self._jobs.values() if e.state is JobState.GRANTED]
            return sum(max(0, e.targets - e.written) for e in held)

    @property
    def quarantined_blocks(self) -> int:
        """Number of blocks whose writer was told to stop and is not proved quiet."""
        if not self._quarantined:
            return 0
        with self._lock:
            return sum(len(entry.blocks) for entry in self._quarantined.values())
