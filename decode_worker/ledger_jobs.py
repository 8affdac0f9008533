"""The open jobs of a ledger: how they end, their deadlines, and what other threads must do for
them.

The states, the locks and what always holds: see ledger.py.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.decode_worker.breaker import ClaimBreaker
from pullfill.decode_worker.ledger_dues import Dues
from pullfill.decode_worker.ledger_totals import Totals
from pullfill.decode_worker.ledger_types import (
    UNDER_WAY,
    Action,
    CancelMessage,
    EngineEvent,
    Entry,
    Hold,
    JobState,
    Release,
    SendRevoke,
    Settle,
)
from pullfill.errors import Outcome
from pullfill.runtime import log
from pullfill.transfer.contract import OwnerFences
from pullfill.wire import FenceToken, KvMode

logger = log.get("decode_worker.ledger")

_REMEMBERED = 16_384
_PROOF_SOONEST_S = 0.002
_PROOF_LATEST_S = 0.05
_LATE_S = 1.0

P = ParamSpec("P")
T = TypeVar("T")
Self = TypeVar("Self", bound="OpenJobs")


def locked(method: Callable[Concatenate[Self, P], T]) -> Callable[Concatenate[Self, P], T]:
    """Call the method with the lock held. Then wake the threads that have something to take."""

    @wraps(method)
    def call(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with self._lock:
                return method(self, *args, **kwargs)
        finally:
            self._wake()

    return call


class OpenJobs:
    """The part of the ledger that no prefill worker asks for. `Ledger` documents the arguments."""

    def __init__(
        self,
        fences: OwnerFences,
        *,
        incarnation: str,
        max_attempts: int = 3,
        kv_mode: KvMode = KvMode.PUSH_ASYNC,
        clock: Clock = SYSTEM_CLOCK,
        on_event: Callable[[], None] = lambda: None,
        on_action: Callable[[], None] = lambda: None,
        on_outcome: Callable[[Entry, Outcome], None] = lambda _e, _o: None,
    ) -> None:
        self._fences = fences
        self._clock = clock
        self._max_attempts = max_attempts
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
        self._totals = Totals()
        self._dues = Dues()
        self.target_blocks = 0
        self._events: deque[EngineEvent] = deque()
        self._actions: deque[Action] = deque()
        self._told = False
        self._on_event = on_event
        self._on_action = on_action
        self._on_outcome = on_outcome

    def unclaimed(self) -> list[Any]:
        """Return the queue's receipts of the jobs that wait for a claim."""
        with self._lock:
            entries = list(self._jobs.values())
        # Without the lock, for which the engine thread waits. `message_gone` looks again.
        return [e.receipt for e in entries if e.state is JobState.QUEUED and e.receipt is not None]

    # ------------------------------------------------------------------ give up

    @locked
    def message_gone(self, job_id: str) -> str | None:
        """Serve the job locally if it waits for a claim: the queue has its message no more.

        Returns its request id. None: it does not wait."""
        entry = self._jobs.get(job_id)
        if entry is None or entry.settled or entry.state is not JobState.QUEUED:
            return None
        self._give_up(entry, Outcome.JOB_GONE)
        return entry.request_id

    @locked
    def cancel(self, request_id: str) -> None:
        """Close the job of a request that is over in vLLM, if one is open.

        The request is settled all the same, so that vLLM frees its blocks."""
        entry = self._jobs.get(self._by_request.get(request_id, ""))
        if entry is not None and not entry.settled:
            self._give_up(entry, Outcome.CANCELLED)

    @locked
    def give_up_all(
        self, outcome: Outcome, *, but_granted: bool = False, but_trials: bool = False
    ) -> None:
        """Serve every open job locally.

        but_granted: let those end that a prefill worker computes or has computed.
        but_trials: leave those of the self-check. They do not come from the queue."""
        for entry in list(self._jobs.values()):
            under_way = but_granted and entry.state in UNDER_WAY
            if not (entry.settled or under_way or (but_trials and entry.self_check)):
                self._give_up(entry, outcome)

    @locked
    def distrust(self, writer: str) -> None:
        """Serve locally what this prefill worker computes, and what of it is not loaded yet."""
        for entry in list(self._jobs.values()):
            if entry.writer == writer and entry.state in UNDER_WAY and not entry.settled:
                self._give_up(entry, Outcome.SELF_CHECK)

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
        if entry.state in (JobState.QUEUED, JobState.READING):
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
        last attempt, if nobody can deliver its job again, and once two of its writers were lost:
        it may have killed them."""
        self._enter(entry, JobState.QUARANTINED)
        self._quarantined[entry.job_id] = entry
        entry.quarantined_at = self._clock.monotonic()
        self._actions.append(SendRevoke(entry.writer, entry.job_id, entry.attempt, str(reason)))
        self._ask_proof(entry)
        last = entry.attempt >= self._max_attempts or entry.losses > 1
        last = last or entry.self_check
        if requeue and last and not entry.settled:
            lost = reason == Outcome.PREFILL_LOST
            self._give_up(entry, Outcome.PREFILL_LOST if lost else Outcome.PREFILL_FAILED)
        elif requeue and entry.state is JobState.QUARANTINED:
            self._dues.watch(entry)

    def _proved(self, fence: FenceToken) -> bool:
        """Whether nobody can write under this fence any more."""
        try:
            return self._fences.try_revoke(fence)
        except OSError:  # the kernel has no memory for a lock
            logger.exception("cannot ask for the proof that a writer is quiet; asking again soon")
            return False

    def _ask_proof(self, entry: Entry) -> bool:
        """Whether nobody can write to the blocks any more. Then the job is QUEUED, or closed."""
        if entry.reading:
            return False
        if entry.fence is not None and not self._proved(entry.fence):
            return False
        entry.fence, entry.writer = None, ""
        entry.queued_at = self._clock.monotonic()
        self._enter(entry, JobState.QUEUED)
        self._quarantined.pop(entry.job_id, None)
        if entry.held:
            entry.held = False
            self._events.append(Release(entry.job_id))
        if entry.settled:
            self._close(entry, JobState.CLOSED)
        else:
            self._dues.watch(entry)
        return True

    # ------------------------------------------------------------------ settle, close

    def _enter(self, entry: Entry, state: JobState) -> None:
        """Change the state of an open job."""
        entry.state = state
        self._totals.count(entry)

    def _settle(self, entry: Entry, outcome: Outcome) -> None:
        assert not entry.settled, "a request is settled once"
        entry.settled = True
        entry.features = b""  # nobody is granted the job any more, and `Dues` keeps it for a while
        self.claims.ended(entry.job_id)
        loaded = outcome is Outcome.COMMITTED
        self._events.append(Settle(entry.request_id, loaded, outcome))
        self._on_outcome(entry, outcome)

    def _close(self, entry: Entry, state: JobState) -> None:
        entry.state = state
        if self._jobs.pop(entry.job_id, None) is not None:
            self.target_blocks -= entry.targets
            self._totals.forget(entry)
        self._quarantined.pop(entry.job_id, None)
        if self._by_request.get(entry.request_id) == entry.job_id:
            del self._by_request[entry.request_id]
        self._ended[entry.job_id] = state
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    # ------------------------------------------------------------------ time

    @locked
    def tick(self) -> float | None:
        """Give up what is past its deadline, and ask again for proofs.

        Returns the seconds until the next call is useful. None: nothing is open."""
        now = self._clock.monotonic()
        while (due := self._dues.soonest()) is not None and due <= now:
            self._expire(self._dues.pop())
        for entry in list(self._quarantined.values()):
            if entry.state is JobState.QUARANTINED:
                self._ask_proof(entry)
        due = self._dues.soonest()
        soonest = math.inf if due is None else due - now
        for entry in self._quarantined.values():
            # A running batch ends within milliseconds, a stopped writer maybe never.
            waited = (now - entry.quarantined_at) / 8
            soonest = min(soonest, max(waited, _PROOF_SOONEST_S), _PROOF_LATEST_S)
        self._dues.next_look = now + soonest
        return None if soonest == math.inf else soonest

    @property
    def overdue(self) -> bool:
        """Whether `tick` is called much later than it asked for. Then its thread hangs, and another
        thread must call it (docs/failure-modes.md)."""
        return self._clock.monotonic() > self._dues.next_look + _LATE_S

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
        """Serve the job locally. If that opens the breaker, do so with every queued job. Jobs whose
        deadline comes before their claim timeout do not count."""
        counts = not entry.self_check and entry.queued_at + entry.claim_timeout_s <= entry.deadline
        opens = counts and self.claims.timed_out(entry.job_id, entry.queued_at)
        self._give_up(entry, Outcome.CLAIM_TIMEOUT if entry.published else Outcome.TIMEOUT)
        for other in list(self._jobs.values()) if opens else ():
            if other.state is JobState.QUEUED and not other.settled:
                self._give_up(other, Outcome.CLAIMS_STALLED)

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

    def was_committed(self, job_id: str) -> bool:
        """Whether a job that is no longer open was committed."""
        return self._ended.get(job_id) is JobState.COMMITTED

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
        return dict(self._totals.jobs)

    def queued(self) -> tuple[int, int]:
        """Number of jobs that nobody has claimed, and of the tokens to compute for them."""
        return self._totals.jobs[JobState.QUEUED], self._totals.queued_tokens

    def uncomputed(self) -> int:
        """Number of tokens that prefill workers have still to compute, over all open jobs."""
        return self._totals.uncomputed

    def unwritten(self) -> int:
        """Number of blocks that are not written yet, over all jobs that prefill workers hold."""
        return self._totals.unwritten

    @property
    def quarantined_blocks(self) -> int:
        """Number of blocks whose writer was told to stop and is not proved quiet."""
        if not self._quarantined:
            return 0
        with self._lock:
            return sum(len(entry.blocks) for entry in self._quarantined.values())
