"""The handoff ledger: which prefill job may touch which blocks, and who is told what, once.

One entry per remote prefill, from `open` until it is terminal:

    QUEUED ──claim──▶ GRANTED(n) ──commit(n)──▶ COMMITTED
      │                 │ revoke: fail, cancel, deadline, writer lost, claim by another worker
      │                 ▼
      │            fence proved dead at once? ──no──▶ QUARANTINED(n)
      │                 │ yes                            │ proof
      └──cancel/─▶ CLOSED ◀──────── or back to QUEUED ◀──┘
         deadline

Two things end separately. The *request* is settled exactly once (loaded, or recompute locally); the
*blocks* go back to the pool only when the fence is proved dead (transfer/contract.py). When the
request is settled while its writer may still write, the engine is told to hold the blocks first.

Pure state: no I/O, no vLLM. Time comes from a Clock, fences from an OwnerFences. Methods may be
called from the engine thread and from the asyncio thread; each takes the one lock for
microseconds. What must be done elsewhere is queued: `take_events` for the engine thread,
`take_actions` for the asyncio thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.decode_worker.entry import Entry, JobState
from pullfill.decode_worker.moves import (
    Action,
    CancelMessage,
    Claimed,
    EngineEvent,
    GrantView,
    Hold,
    NakDelivery,
    Release,
    SendRevoke,
    Settle,
)
from pullfill.errors import Outcome, OverloadedError
from pullfill.transfer.contract import OwnerFences
from pullfill.wire import RefuseReason

__all__ = ["Entry", "JobState", "Ledger"]

HELD_RETRY_S = 0.05
_REMEMBERED = 16_384
_PROOF_SOONEST_S = 0.002
_PROOF_LATEST_S = 0.05


class Ledger:
    """All remote prefills of one decode worker.

    on_event / on_action: called (under no lock) after something was queued for the engine thread /
    the asyncio thread; they must only wake that thread.
    """

    def __init__(
        self,
        fences: OwnerFences,
        *,
        incarnation: str,
        max_attempts: int = 3,
        clock: Clock = SYSTEM_CLOCK,
        on_event: Callable[[], None] = lambda: None,
        on_action: Callable[[], None] = lambda: None,
        on_outcome: Callable[[Entry, Outcome], None] = lambda _e, _o: None,
    ) -> None:
        self._fences = fences
        self._clock = clock
        self._max_attempts = max_attempts
        self.incarnation = incarnation
        self._lock = threading.Lock()
        self._jobs: dict[str, Entry] = {}
        self._by_request: dict[str, str] = {}
        self._ended: OrderedDict[str, JobState] = OrderedDict()
        self._events: deque[EngineEvent] = deque()
        self._actions: deque[Action] = deque()
        self._on_event = on_event
        self._on_action = on_action
        self._on_outcome = on_outcome

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
    ) -> None:
        """Register a job before it is published. Its request waits until it is settled, so the
        asyncio thread is woken to time the deadline: it may be asleep with nothing to wait for."""
        now = self._clock.monotonic()
        due = now + timeout_s
        entry = Entry(job_id, request_id, blocks, first_target, hit_tokens, due, opened_at=now)
        with self._lock:
            self._jobs[job_id] = entry
            self._by_request[request_id] = job_id
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
        """Grant the job to `writer` (a control connection), or say why not."""
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
        if entry.state is JobState.GRANTED:
            if entry.writer == writer:
                return Claimed(refused=RefuseReason.HELD, retry_after_s=1.0)
            self._revoke(entry, "claimed_by_another", requeue=True)
        if entry.settled:
            return Claimed(refused=RefuseReason.CLOSED)
        if entry.state is JobState.QUARANTINED:
            return Claimed(refused=RefuseReason.HELD, retry_after_s=HELD_RETRY_S)
        now = self._clock.monotonic()
        if now >= entry.deadline:
            self._give_up(entry, Outcome.TIMEOUT)
            return Claimed(refused=RefuseReason.CLOSED)
        try:
            fence = self._fences.open(entry.blocks)
        except OverloadedError:
            return Claimed(refused=RefuseReason.HELD, retry_after_s=1.0)
        entry.attempt += 1
        entry.state, entry.writer, entry.fence = JobState.GRANTED, writer, fence
        entry.ack_subject = ack_subject
        return Claimed(
            grant=GrantView(
                entry.attempt,
                entry.deadline - now,
                entry.blocks,
                entry.hit_tokens,
                entry.digest,
                fence,
                now - entry.opened_at,
            )
        )

    def commit(
        self, job_id: str, attempt: int, incarnation: str, writer: str, blocks: int
    ) -> str | None:
        """Accept the bytes of the current attempt. None: accepted, the request is settled as
        loaded. Else why not (stale attempt, wrong count): nothing changes for a stale one."""
        try:
            with self._lock:
                entry = self._current(job_id, attempt, incarnation, writer)
                if entry is None or entry.state is not JobState.GRANTED:
                    return "stale"
                if blocks != len(entry.blocks) - entry.first_target:
                    self._give_up(entry, Outcome.REJECTED)
                    return "wrong_block_count"
                assert entry.fence is not None
                if not self._fences.try_revoke(entry.fence):
                    # A writer that commits must be quiet; this one is not: use nothing of it.
                    self._give_up(entry, Outcome.REJECTED)
                    return "writer_not_quiet"
                entry.fence = None
                self._settle(entry, Outcome.COMMITTED, loaded=True)
                self._end(entry, JobState.COMMITTED)
                return None
        finally:
            self._wake()

    def hand_back(
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
        """A control connection ended. Its jobs go to another worker if one is connected. If none
        is, every open job is served locally, also those nobody has claimed: waiting for a worker
        that may never come would cost each of them its whole deadline. Blocks stay held until the
        writes into them are proved over."""
        with self._lock:
            for entry in list(self._jobs.values()):
                if not others_alive:
                    if not entry.settled:
                        self._give_up(entry, Outcome.PREFILL_LOST)
                    continue
                if entry.state is not JobState.GRANTED or entry.writer != writer:
                    continue
                ack_subject = entry.ack_subject
                self._revoke(entry, Outcome.PREFILL_LOST, requeue=True)
                if not entry.settled and ack_subject:
                    self._actions.append(NakDelivery(ack_subject))
        self._wake()

    # ------------------------------------------------------------------ time

    def tick(self) -> float | None:
        """Give up what is past its deadline and ask again for proofs. Returns seconds until the
        next call is useful, None when nothing is open."""
        now = self._clock.monotonic()
        soonest: float | None = None
        with self._lock:
            for entry in list(self._jobs.values()):
                if not entry.settled and now >= entry.deadline:
                    self._give_up(entry, Outcome.TIMEOUT)
                if entry.state is JobState.QUARANTINED:
                    self._ask_proof(entry)
                if entry.job_id not in self._jobs:
                    continue
                due = entry.deadline - now
                if entry.state is JobState.QUARANTINED:
                    # A running batch ends within milliseconds, a stopped writer maybe never.
                    waited = (now - entry.quarantined_at) / 8
                    due = min(max(waited, _PROOF_SOONEST_S), _PROOF_LATEST_S)
                soonest = due if soonest is None else min(soonest, due)
        self._wake()
        return soonest

    def give_up_all(self, outcome: Outcome, *, but_granted: bool = False) -> None:
        """Serve every open job locally; `but_granted`: those under way may end."""
        with self._lock:
            for entry in list(self._jobs.values()):
                under_way = but_granted and entry.state is JobState.GRANTED
                if not entry.settled and not under_way:
                    self._give_up(entry, outcome)
        self._wake()

    def new_incarnation(self, incarnation: str) -> None:
        """Refuse every claim and commit made for the old one; open jobs are served locally."""
        self.give_up_all(Outcome.PREFILL_LOST)
        with self._lock:
            self.incarnation = incarnation

    # ------------------------------------------------------------------ views

    def take_actions(self) -> list[Action]:
        """What the asyncio thread must send. Empties the queue."""
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
        waits = JobState.QUARANTINED
        with self._lock:
            return sum(len(e.blocks) for e in self._jobs.values() if e.state is waits)

    def find(self, job_id: str) -> Entry | None:
        return self._jobs.get(job_id)

    @property
    def open_jobs(self) -> int:
        return len(self._jobs)

    # ------------------------------------------------------------------ moves (lock held)

    def _current(self, job_id: str, attempt: int, incarnation: str, writer: str) -> Entry | None:
        entry = self._jobs.get(job_id)
        if entry is None or incarnation != self.incarnation:
            return None
        return entry if (entry.attempt, entry.writer) == (attempt, writer) else None

    def _open_entry_of(self, request_id: str) -> Entry | None:
        entry = self._jobs.get(self._by_request.get(request_id, ""))
        return None if entry is None or entry.settled else entry

    def _give_up(self, entry: Entry, outcome: Outcome) -> None:
        """Settle the request without the remote result and close the job."""
        if entry.state is JobState.GRANTED:
            self._revoke(entry, outcome, requeue=False)
        if not entry.settled:
            if entry.state is JobState.QUARANTINED:
                entry.held = True
                self._events.append(Hold(entry.job_id, entry.blocks))
            self._settle(entry, outcome, loaded=False)
        if entry.receipt is not None:
            self._actions.append(CancelMessage(entry.receipt))
            entry.receipt = None
        if entry.state is JobState.QUEUED:
            self._end(entry, JobState.CLOSED)

    def _revoke(self, entry: Entry, reason: str, *, requeue: bool) -> None:
        """GRANTED → QUEUED with proof, else QUARANTINED. Out of attempts → given up."""
        assert entry.fence is not None
        entry.state = JobState.QUARANTINED
        entry.quarantined_at = self._clock.monotonic()
        self._actions.append(SendRevoke(entry.writer, entry.job_id, entry.attempt, str(reason)))
        self._ask_proof(entry)
        if requeue and entry.attempt >= self._max_attempts and not entry.settled:
            self._give_up(entry, Outcome.PREFILL_FAILED)

    def _ask_proof(self, entry: Entry) -> None:
        assert entry.fence is not None
        if not self._fences.try_revoke(entry.fence):
            return
        entry.fence, entry.writer = None, ""
        entry.state = JobState.QUEUED
        if entry.held:
            entry.held = False
            self._events.append(Release(entry.job_id))
        if entry.settled:
            self._end(entry, JobState.CLOSED)

    def _settle(self, entry: Entry, outcome: Outcome, *, loaded: bool) -> None:
        assert not entry.settled, "a request is settled once"
        entry.settled = True
        self._events.append(Settle(entry.request_id, loaded, outcome))
        self._on_outcome(entry, outcome)

    def _end(self, entry: Entry, state: JobState) -> None:
        entry.state = state
        self._jobs.pop(entry.job_id, None)
        if self._by_request.get(entry.request_id) == entry.job_id:
            del self._by_request[entry.request_id]
        self._ended[entry.job_id] = state
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def _wake(self) -> None:
        if self._events:
            self._on_event()
        if self._actions:
            self._on_action()
