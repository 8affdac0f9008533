"""The ledger's entries and the moves between their states; ledger.py is the door to it.

Every method here but `_wake` is called with the lock held. Pure state: no I/O, no vLLM.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.decode_worker.breaker import ClaimBreaker
from pullfill.decode_worker.dues import Dues
from pullfill.decode_worker.entry import UNDER_WAY, Entry, JobState
from pullfill.decode_worker.moves import (
    Action,
    CancelMessage,
    EngineEvent,
    Hold,
    Release,
    SendRevoke,
    Settle,
    Verify,
)
from pullfill.errors import Outcome
from pullfill.transfer.contract import OwnerFences
from pullfill.wire import DigestMode, KvMode

_REMEMBERED = 16_384


class Book:
    """The state of a `Ledger`, and the moves of one entry from state to state.

    kv_digest: which of the written blocks must be verified before the request is told.
    kv_mode: how the KV gets into the blocks. Grants tell it to the prefill worker.
    on_event: called, with no lock held, after an event was queued for the engine thread. It must
    only wake that thread.
    on_action: the same for actions and the asyncio thread.
    tell_opens: wake the asyncio thread on every open, not only when the next deadline moves
    earlier. Set while no prefill worker pulls.
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
        # What is asked or looked at often, kept so that it costs the same however many jobs wait.
        self._dues = Dues()
        self._quarantined: dict[str, Entry] = {}
        self._target_blocks = 0
        self._by_request: dict[str, str] = {}
        self._ended: OrderedDict[str, JobState] = OrderedDict()
        self._events: deque[EngineEvent] = deque()
        self._told = False
        self._actions: deque[Action] = deque()
        self._next_tick = math.inf
        self._on_event = on_event
        self._on_action = on_action
        self._on_outcome = on_outcome

    def _wake(self) -> None:
        """After the lock is let go of. The engine thread is woken once for all events it has not
        taken yet: a wake-up costs more than the rest of a claim."""
        with self._lock:
            tell = bool(self._events) and not self._told
            self._told = self._told or tell
        if tell:
            self._on_event()
        if self._actions:
            self._on_action()

    def _current(self, job_id: str, attempt: int, incarnation: str, writer: str) -> Entry | None:
        entry = self._jobs.get(job_id)
        if entry is None or incarnation != self.incarnation:
            return None
        return entry if (entry.attempt, entry.writer) == (attempt, writer) else None

    def _open_entry_of(self, request_id: str) -> Entry | None:
        entry = self._jobs.get(self._by_request.get(request_id, ""))
        return None if entry is None or entry.settled else entry

    def _take_over(self, entry: Entry, blocks: int) -> str | None:
        """The writer of a grant says that its part is done. None: that is so, and it is proved
        quiet. Else why not; the request is served locally."""
        if blocks != entry.targets:
            self._give_up(entry, Outcome.REJECTED)
            return "wrong_block_count"
        assert entry.fence is not None
        if not self._fences.try_revoke(entry.fence):
            # A writer that says so must be quiet; this one is not: use nothing of it.
            self._give_up(entry, Outcome.REJECTED)
            return "writer_not_quiet"
        entry.fence = None
        return None

    def _arrived(self, entry: Entry, digest: bytes | None) -> Verify | None:
        """All bytes are in its blocks: settle the request, or verify them first."""
        if self.kv_digest is DigestMode.OFF:
            self._settle(entry, Outcome.COMMITTED, loaded=True)
            self._end(entry, JobState.COMMITTED)
            return None
        entry.state = JobState.VERIFYING
        targets = entry.blocks[entry.first_target :]
        return Verify(
            entry.job_id, entry.attempt, targets, self.kv_digest, entry.digest, digest or b""
        )

    def _expire(self, entry: Entry) -> None:
        """Its time is up; the outcome says in which stage."""
        if entry.state is JobState.QUEUED:
            self._nobody_claimed(entry)
            return
        outcome = Outcome.TIMEOUT
        if entry.state is JobState.QUARANTINED:
            if self._ask_proof(entry):
                return  # in the last moment: it waits for another claim
            if self._clock.monotonic() < entry.deadline:
                outcome = Outcome.QUARANTINED
        self._give_up(entry, outcome)

    def _nobody_claimed(self, entry: Entry) -> None:
        """Serve it locally, and if the breaker opens by it, everything else that is queued."""
        computing = any(other.state in UNDER_WAY for other in self._jobs.values())
        opens = self.claims.timed_out(entry.job_id, entry.queued_at, computing=computing)
        self._give_up(entry, Outcome.CLAIM_TIMEOUT)
        for other in list(self._jobs.values()) if opens else ():
            if other.state is JobState.QUEUED and not other.settled:
                self._give_up(other, Outcome.CLAIMS_STALLED)

    def _give_up(self, entry: Entry, outcome: Outcome) -> None:
        """Settle the request without the remote result and close the job."""
        if entry.state is JobState.GRANTED or entry.reading:
            self._revoke(entry, outcome, requeue=False)
        if not entry.settled:
            if entry.state is JobState.QUARANTINED:
                entry.held = True
                self._events.append(Hold(entry.job_id, entry.blocks))
            self._settle(entry, outcome, loaded=False)
        self._forget_message(entry)
        if entry.state in (JobState.QUEUED, JobState.READING, JobState.VERIFYING):
            self._end(entry, JobState.CLOSED)  # nobody can write to its blocks

    def _forget_message(self, entry: Entry) -> None:
        """No prefill worker is wanted any more: take the job out of the queue."""
        if entry.receipt is not None:
            self._actions.append(CancelMessage(entry.receipt))
            entry.receipt = None

    def _revoke(self, entry: Entry, reason: str, *, requeue: bool) -> None:
        """GRANTED → QUEUED with proof, else QUARANTINED: requeue means that its request waits for
        the proof, NO_PROOF_S at most. Out of attempts → given up. What is being read is QUARANTINED
        until that is over."""
        entry.state = JobState.QUARANTINED
        self._quarantined[entry.job_id] = entry
        entry.quarantined_at = self._clock.monotonic()
        self._actions.append(SendRevoke(entry.writer, entry.job_id, entry.attempt, str(reason)))
        self._ask_proof(entry)
        if requeue and entry.attempt >= self._max_attempts and not entry.settled:
            self._give_up(entry, Outcome.PREFILL_FAILED)
        elif requeue and entry.state is JobState.QUARANTINED:
            self._dues.add(entry)

    def _ask_proof(self, entry: Entry) -> bool:
        """Whether nobody can write to its blocks any more; then it is QUEUED, or over."""
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
            self._end(entry, JobState.CLOSED)
        else:
            self._dues.add(entry)
        return True

    def _settle(self, entry: Entry, outcome: Outcome, *, loaded: bool) -> None:
        assert not entry.settled, "a request is settled once"
        entry.settled = True
        self.claims.ended(entry.job_id)
        self._events.append(Settle(entry.request_id, loaded, outcome))
        self._on_outcome(entry, outcome)

    def _end(self, entry: Entry, state: JobState) -> None:
        entry.state = state
        if self._jobs.pop(entry.job_id, None) is not None:
            self._target_blocks -= entry.targets
        self._quarantined.pop(entry.job_id, None)
        if self._by_request.get(entry.request_id) == entry.job_id:
            del self._by_request[entry.request_id]
        self._ended[entry.job_id] = state
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
