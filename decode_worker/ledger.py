"""The ledger: the state machine of every remote prefill of one decode worker.

It decides who may write to which blocks, when a request goes on, and when blocks are free. The
scheduler (engine thread) opens jobs and takes events. `Handoff` (asyncio thread) grants, commits
and takes actions. Nothing here does I/O or knows vLLM. `Ledger` lives as long as the worker's KV
memory.
"""

from __future__ import annotations

import enum
import itertools
import math
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from pullfill.backoff import Backoff
from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.errors import Outcome, OverloadedError
from pullfill.runtime import log
from pullfill.transfer.shm.fence import ShmFences
from pullfill.wire import (
    Claim,
    Commit,
    FenceToken,
    GiveUp,
    Grant,
    KvMode,
    Progress,
    Ready,
    Refused,
    RefuseReason,
    Revoke,
)

logger = log.get("decode_worker.ledger")

# How long a request waits for the proof that its revoked writer is quiet. A running batch ends
# within milliseconds. A writer whose process is stopped in a batch may never end it.
NO_PROOF_S = 0.1
# Number of grants after which a job goes to no other prefill worker.
MAX_ATTEMPTS = 3
# The first and the longest pause of the breaker before it tries a job again. Each trial costs one
# prompt a fifth of its claim timeout.
BREAKER_PAUSES_S = (1.0, 5.0)
_REMEMBERED = 16_384

P = ParamSpec("P")
T = TypeVar("T")


# ---------------------------------------------------------------------- states
#
#   open ──▶ QUEUED ──grant──▶ GRANTED(n) ──commit(n)──▶ COMMITTED
#              │                 │
#              │                 │ revoke: given up, cancelled, deadline, writer lost
#              │                 ▼
#              │            fence proved dead at once? ──no──▶ QUARANTINED(n)
#              │                 │ yes                            │ proof
#              └──cancel/─▶ CLOSED ◀──────── or back to QUEUED ◀──┘
#                 deadline
#
#   --kv-mode pull:  GRANTED(n) ──ready(n)──▶ READING(n) ──read_over──▶ COMMITTED, or CLOSED
#
# n is the attempt: it counts the grants of a job.


class JobState(enum.StrEnum):
    QUEUED = "queued"
    GRANTED = "granted"
    READING = "reading"
    QUARANTINED = "quarantined"
    COMMITTED = "committed"
    CLOSED = "closed"


UNDER_WAY = frozenset({JobState.GRANTED, JobState.READING})
"""A prefill worker computes the job, or has computed it."""
# The states that may follow each state of an open job.
_NEXT = {
    JobState.QUEUED: {JobState.GRANTED, JobState.CLOSED},
    JobState.GRANTED: {JobState.READING, JobState.QUARANTINED, JobState.COMMITTED},
    JobState.READING: {JobState.QUARANTINED, JobState.COMMITTED, JobState.CLOSED},
    # Only the proof leads out of quarantine.
    JobState.QUARANTINED: {JobState.QUEUED},
}


@dataclass(slots=True)
class Sums:
    """Of all open jobs."""

    jobs: Counter[JobState] = field(default_factory=Counter)  # number of jobs in each state
    queued_tokens: int = 0  # tokens to compute for the jobs that nobody has claimed
    uncomputed: int = 0  # tokens that prefill workers have still to compute
    unwritten: int = 0  # blocks that prefill workers have still to write for jobs that they hold
    targets: int = 0  # blocks that jobs bind: prefill workers write to them, or they are held


@dataclass(slots=True)
class Entry:
    """One open job. Only the ledger changes it, with its lock held."""

    job_id: str
    request_id: str
    # All blocks of the prompt on this worker, hit blocks first. The writer may touch only
    # `blocks[first_target:]`.
    blocks: tuple[int, ...]
    first_target: int
    timeout_s: float  # most seconds for the whole job
    tokens: int = 0  # number of tokens that a prefill worker must compute
    claim_timeout_s: float = math.inf  # most seconds for each wait for a claim
    # An attempt that makes progress may go on beyond timeout_s. It ends after this many seconds
    # without progress.
    stall_s: float = 0.0
    due_s: float = 0.0  # in how many seconds from its opening its first token is late
    # The only prefill worker that gets the job: name of its connection. Such a job tells nothing
    # about the queue. Empty: the job is published.
    to: str = ""

    # Times by the ledger's clock. queued_at is infinite for a job that is not published yet:
    # claim_timeout_s counts from `set_digest` on.
    opened_at: float = field(init=False, default=0.0)
    queued_at: float = field(init=False, default=math.inf)
    granted_at: float = field(init=False, default=0.0)
    quarantined_at: float = field(init=False, default=0.0)
    deadline: float = field(init=False, default=math.inf)

    state: JobState = field(init=False, default=JobState.QUEUED)
    digest: bytes = field(init=False, default=b"")
    # Encoded multimodal inputs, which the grant brings. Empty once the job is settled.
    features: bytes = field(init=False, default=b"")
    # Of the queue, once the job is stored there and as long as it may have to be deleted.
    receipt: Any = field(init=False, default=None)
    # Number of grants so far, and how many of their writers were lost.
    attempt: int = field(init=False, default=0)
    losses: int = field(init=False, default=0)
    # Control connection, delivery and fence of the current grant.
    writer: str = field(init=False, default="")
    ack_subject: str = field(init=False, default="")
    fence: FenceToken | None = field(init=False, default=None)
    # Number of target blocks that the current attempt has reported as written.
    written: int = field(init=False, default=0)
    # Whether our own reader copies into the blocks, or will.
    reading: bool = field(init=False, default=False)
    # Whether the request was told how its remote prefill ended. An open job is settled only in
    # quarantine. Then the engine was told to hold its blocks.
    settled: bool = field(init=False, default=False)

    @property
    def published(self) -> bool:
        """Whether the job went to the queue, or is just on its way there."""
        return self.queued_at < math.inf

    @property
    def targets(self) -> int:
        """Number of blocks that the writer may touch."""
        return len(self.blocks) - self.first_target

    @property
    def unwritten(self) -> int:
        """Number of blocks that the prefill worker that holds the job has still to write."""
        return max(0, self.targets - self.written) if self.state is JobState.GRANTED else 0

    @property
    def uncomputed(self) -> int:
        """Number of tokens that a prefill worker has still to compute, judged by its blocks."""
        if self.state is JobState.QUEUED:
            return self.tokens
        return round(self.tokens * self.unwritten / max(1, self.targets))

    @property
    def since(self) -> float:
        """When the job came into its state. Of one under way: when it was granted."""
        if self.state is JobState.QUEUED:
            return self.queued_at if self.published else self.opened_at
        return self.quarantined_at if self.state is JobState.QUARANTINED else self.granted_at

    @property
    def due(self) -> float:
        """When the job has been in its state for too long."""
        if self.state is JobState.QUEUED:
            return min(self.deadline, self.queued_at + self.claim_timeout_s)
        if self.state is JobState.QUARANTINED:
            return min(self.deadline, self.quarantined_at + NO_PROOF_S)
        return self.deadline


# ---------------------------------------------------------------------- events: the engine thread


@dataclass(frozen=True, slots=True)
class Hold:
    """Take one more reference to these blocks, so that vLLM cannot reuse what it frees."""

    job_id: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Drop the references that were taken for this job: its writer is proved quiet."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Settle:
    """Tell vLLM that the request's remote prefill has ended."""

    request_id: str
    outcome: Outcome

    @property
    def loaded(self) -> bool:
        """Whether the KV is there. Otherwise vLLM computes the prompt here."""
        return self.outcome is Outcome.COMMITTED


EngineEvent = Hold | Release | Settle


# ---------------------------------------------------------------------- actions: the asyncio thread


@dataclass(frozen=True, slots=True)
class CancelMessage:
    """Delete this job from the queue. The receipt is the queue's."""

    receipt: Any


@dataclass(frozen=True, slots=True)
class NakDelivery:
    """Nak the delivery of a lost prefill worker, so that the queue delivers the job again.

    receipt: of the queue. None if the queue has not confirmed the job yet."""

    ack_subject: str
    receipt: Any


@dataclass(frozen=True, slots=True)
class SendRevoke:
    """Tell the writer to stop."""

    writer: str
    revoke: Revoke


Action = CancelMessage | NakDelivery | SendRevoke


Said = Progress | Commit | Ready | GiveUp


# ---------------------------------------------------------------------- the breaker of claims


class ClaimBreaker:
    """Stops queueing while claims time out one after another. Then one job is tried at a time.

    A claim timeout counts as a stall if no job of this decode worker was claimed while the job
    waited, even while prefill workers compute other jobs: the next prompts would wait as long.
    Each trial that nobody claims doubles the pause.
    Call it under the ledger's lock. Any thread may read `closed` and `stalled`."""

    #   CLOSED ──stalls──▶ OPEN ──pause──▶ HALF-OPEN ──next prompt is queued──▶ TRIAL
    #      ▲                ▲                  ▲                                  │
    #      │                └──not claimed─────┼──────────────────────────────────┤
    #      │                                   └──cancelled, not published────────┤
    #      └──any claim───────────────────────────────────────────────────────────┘

    STALLS = 3  # so many open the breaker
    TRIAL_SHARE = 0.2  # the trial waits for this share of the claim timeout only

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._backoff = Backoff(*BREAKER_PAUSES_S)
        self._claimed_at = -math.inf
        self.claimed()

    def claimed(self) -> None:
        """A job of this decode worker was claimed. Closes the breaker."""
        self._claimed_at, self._stalls = self._clock.monotonic(), 0
        self._backoff.reset()
        self._open_until: float | None = None
        self._trial = ""

    @property
    def closed(self) -> bool:
        """Whether prompts are queued as usual. Only a claim closes an open breaker."""
        return self._open_until is None

    @property
    def stalled(self) -> bool:
        """Whether prompts are prefilled here: the breaker is open, or a trial is under way."""
        until = self._open_until
        return until is not None and (bool(self._trial) or self._clock.monotonic() < until)

    def queued(self, job_id: str) -> bool:
        """Note that a job is queued. Returns True if it is the trial."""
        if self.closed or self.stalled:
            return False
        self._trial = job_id
        return True

    def timed_out(self, job_id: str, queued_at: float) -> bool:
        """Note that nobody claimed the job in time.

        Returns True if this opens the breaker. Then the caller serves all queued jobs locally."""
        if not self.closed:
            if job_id == self._trial:
                self._open()
            return False
        if queued_at < self._claimed_at:
            return False
        self._stalls += 1
        if self._stalls < self.STALLS:
            return False
        self._open()
        return True

    def ended(self, job_id: str) -> None:
        """Note that the job is over. After a trial without a result the next job is the trial."""
        if job_id == self._trial:
            self._trial = ""

    def _open(self) -> None:
        self._trial = ""
        self._open_until = self._clock.monotonic() + self._backoff.next()


def _ask_again_s(waited_s: float) -> float:
    """Return when to ask again for a proof: after 2 ms at first, later every 50 ms.

    A running batch ends within milliseconds, a stopped writer maybe never."""
    return min(max(waited_s / 8, 0.002), 0.05)


def locked(
    method: Callable[Concatenate[Ledger, P], T],
) -> Callable[Concatenate[Ledger, P], T]:
    """Call the method with the lock held. Then wake the threads that have something to take."""

    @wraps(method)
    def call(self: Ledger, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with self._lock:
                return method(self, *args, **kwargs)
        finally:
            self._wake()

    return call


@dataclass(eq=False, repr=False)
class Ledger:
    """All remote prefills of one decode worker."""

    # What always holds:
    #
    # - A request is settled exactly once: either its KV is loaded, or its prompt is computed here.
    # - The blocks of a job are free only when its writer is proved quiet (transfer/contract.py).
    #   Time is no proof. If the request is settled before that, the engine is told to hold the
    #   blocks first.
    # - A request waits for that proof for NO_PROOF_S at most.
    # - One writer holds a job at a time. No claim takes a job from its holder.
    # - The writer of a READING job is our own reader. `read_over` is the proof that it is quiet.
    #
    # One lock guards all of it, for microseconds. Methods that begin with an underscore are called
    # with the lock held; `on_event` and `on_action` without it.

    fences: ShmFences
    incarnation: str
    # How the KV gets into the blocks. Grants tell it to the prefill worker.
    kv_mode: KvMode = KvMode.PUSH_ASYNC
    clock: Clock = SYSTEM_CLOCK
    # Called after an event was queued for the engine thread. It must only wake that thread.
    on_event: Callable[[], object] = lambda: None
    # The same for the asyncio thread: there are actions, or `tick` is due earlier.
    on_action: Callable[[], object] = lambda: None
    claims: ClaimBreaker = field(init=False)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _jobs: dict[str, Entry] = field(init=False, default_factory=dict)
    _ended: OrderedDict[str, JobState] = field(init=False, default_factory=OrderedDict)
    # Those of `_jobs` that `tick` asks proofs for.
    _quarantined: dict[str, Entry] = field(init=False, default_factory=dict)
    # Kept up to date, so that a decision costs the same however many jobs are open.
    _sums: Sums = field(init=False, default_factory=Sums)
    # When `tick` looks at all jobs next. No job is due before.
    _next_look: float = field(init=False, default=math.inf)
    _earlier: bool = field(init=False, default=False)  # that became earlier, and nobody was told
    _events: deque[EngineEvent] = field(init=False, default_factory=deque)
    _actions: deque[Action] = field(init=False, default_factory=deque)

    def __post_init__(self) -> None:
        self.claims = ClaimBreaker(self.clock)

    # ------------------------------------------------------------------ open, publish

    @locked
    def open(self, entry: Entry) -> None:
        """Register a job before it is published. Its request waits until the job is settled."""
        entry.opened_at = self.clock.monotonic()
        entry.deadline = entry.opened_at + entry.timeout_s
        if not entry.to and self.claims.queued(entry.job_id):
            entry.claim_timeout_s *= self.claims.TRIAL_SHARE
        self._jobs[entry.job_id] = entry
        self._count(entry, 1)
        self._look_by(entry.due)

    @locked
    def set_digest(self, job_id: str, digest: bytes, features: bytes = b"") -> None:
        """Remember the digest of the body that is about to be published, and what a grant brings.

        The wait for a claim begins here, because a claim may come before `published` is called."""
        if (entry := self._jobs.get(job_id)) is None:
            return
        entry.digest, entry.features = digest, features
        if not entry.published:
            entry.queued_at = self.clock.monotonic()
            self._look_by(entry.due)

    @locked
    def published(self, entry: Entry, receipt: Any) -> None:
        """Note that the queue has stored the job. If the job has ended, its message is deleted."""
        if not entry.settled:
            entry.receipt = receipt
        elif entry.state is not JobState.COMMITTED:
            self._actions.append(CancelMessage(receipt))

    # ------------------------------------------------------------------ grant

    @locked
    def grant(self, claim: Claim, writer: str) -> Grant | Refused:
        """Answer a claim: grant the job to the writer, or refuse.

        writer: name of the control connection that claims."""
        entry = self._jobs.get(claim.job_id)
        if (why := self._why_not(entry, claim, writer)) is not None:
            return Refused(rid=claim.rid, reason=why[0], retry_after_s=why[1])
        assert entry is not None
        try:
            fence = self.fences.open(entry.blocks, entry.first_target)
        except OverloadedError:  # another job must end first
            return Refused(rid=claim.rid, reason=RefuseReason.HELD, retry_after_s=1.0)
        if not entry.to:
            self.claims.claimed()
        entry.attempt += 1
        entry.written = 0
        entry.writer, entry.fence, entry.ack_subject = writer, fence, claim.ack_subject
        self._enter(entry, JobState.GRANTED)
        entry.granted_at = self.clock.monotonic()
        return Grant(
            rid=claim.rid,
            job_id=entry.job_id,
            attempt=entry.attempt,
            incarnation=self.incarnation,
            deadline_s=entry.deadline - entry.granted_at,
            due_s=entry.opened_at + entry.due_s - entry.granted_at,
            job_digest=entry.digest,
            fence=fence,
            mode=self.kv_mode,
            features=entry.features,
        )

    def _why_not(
        self, entry: Entry | None, claim: Claim, writer: str
    ) -> tuple[RefuseReason, float | None] | None:
        """Why the writer cannot have the job now, and after how many seconds it may ask again.

        None: it can have the job."""
        if claim.incarnation != self.incarnation:
            return RefuseReason.STALE_INCARNATION, None
        if entry is None:
            ended = self._ended.get(claim.job_id)
            return RefuseReason(ended.value) if ended else RefuseReason.UNKNOWN_JOB, None
        if entry.settled:
            return RefuseReason.CLOSED, None
        if entry.state is JobState.GRANTED and entry.writer == writer:
            return RefuseReason.HELD, 1.0
        if entry.state in UNDER_WAY:
            # A holder that is gone or silent loses its connection. Then `writer_lost` takes the
            # job from it.
            return RefuseReason.IN_PROGRESS, None
        if entry.state is JobState.QUARANTINED:
            return RefuseReason.HELD, 0.05  # a running batch ends within milliseconds
        if self.clock.monotonic() >= entry.due:
            self._expire(entry)
            return RefuseReason.CLOSED, None
        return None

    def _held(self, said: Said, writer: str, *states: JobState) -> Entry | None:
        """The job, if the writer speaks of the attempt that it was granted last, and if the job is
        in one of these states."""
        entry = self._jobs.get(said.job_id)
        if entry is None or said.incarnation != self.incarnation:
            return None
        current = (entry.attempt, entry.writer) == (said.attempt, writer)
        return entry if current and entry.state in states else None

    def progress(self, said: Progress | Ready, writer: str) -> bool:
        """Note that the current attempt has made progress. Its job gets `stall_s` from now.

        So a deadline that was estimated too short does not end an attempt that makes progress.

        said: `Ready` if our reader has read a part of the blocks.
        Returns False if it is not the current attempt."""
        with self._lock:
            if (entry := self._held(said, writer, *UNDER_WAY)) is None:
                return False
            if isinstance(said, Progress):
                self._count(entry, -1)
                entry.written += said.blocks
                self._count(entry, 1)
            entry.deadline = max(entry.deadline, self.clock.monotonic() + entry.stall_s)
            return True

    # ------------------------------------------------------------------ commit, or ready and read

    @locked
    def commit(self, said: Commit, writer: str) -> str | None:
        """Accept the bytes of the current attempt.

        Returns None if they are accepted: the request is settled as loaded. Otherwise returns the
        reason for the refusal. A stale commit changes nothing."""
        if (entry := self._held(said, writer, JobState.GRANTED)) is None:
            return "stale"
        if (why := self._take_over(entry, said.blocks)) is None:
            self._loaded(entry)
        return why

    @locked
    def ready(self, said: Ready, writer: str) -> Entry | str:
        """Let our reader read what the current attempt has computed.

        Returns the job, or the reason for the refusal, as `commit` does. From now on the reader may
        copy into the job's target blocks. However that ends, `read_over` must be told."""
        if (entry := self._held(said, writer, JobState.GRANTED)) is None:
            return "stale"
        if (why := self._take_over(entry, len(said.block_ids) // 4)) is not None:
            return why
        entry.reading = True
        self._enter(entry, JobState.READING)
        return entry

    @locked
    def read_over(self, entry: Entry, *, good: bool) -> str | None:
        """Note that our reader has ended. It never touches the blocks again. Answers as `commit`.

        good: whether it has read all blocks. If not, the prompt is computed here: no other prefill
        worker has the KV."""
        assert entry.reading, "read twice"
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
        if not self.fences.try_revoke(entry.fence):
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
    def give_up(self, job_id: str, outcome: Outcome, *, if_queued: bool = False) -> bool:
        """Serve the request of a job locally.

        Returns whether the request does not wait for the job any more.

        if_queued: not if a prefill worker has the job, or may still write to its blocks."""
        entry = self._jobs.get(job_id)
        if entry is None:
            return True
        if not entry.settled and (entry.state is JobState.QUEUED or not if_queued):
            self._give_up(entry, outcome)
        return entry.settled

    @locked
    def give_up_all(self, outcome: Outcome, *, but_granted: bool = False) -> None:
        """Serve every open job locally.

        but_granted: let those end that a prefill worker computes or has computed, or that were not
        published but sent to one."""
        for entry in list(self._jobs.values()):
            under_way = entry.state in UNDER_WAY or entry.to
            if not (entry.settled or (but_granted and under_way)):
                self._give_up(entry, outcome)

    def new_incarnation(self, incarnation: str) -> None:
        """Refuse every claim and commit of the old incarnation. Open jobs are served locally."""
        with self._lock:  # first: what is opened later says the new one in its job
            self.incarnation = incarnation
        self.give_up_all(Outcome.PREFILL_LOST)

    @locked
    def gave_up(self, said: GiveUp, writer: str) -> None:
        """Handle a writer that gives its attempt up and is quiet."""
        if (entry := self._held(said, writer, JobState.GRANTED)) is None:
            return
        if said.retry:
            self._revoke(entry, said.cause, requeue=True)
        else:
            self._give_up(entry, Outcome.PREFILL_FAILED)

    @locked
    def writer_lost(self, writer: str) -> None:
        """Handle the end of a control connection. Its jobs go back to the queue.

        Their blocks are held until the writer is quiet."""
        for entry in list(self._jobs.values()):
            if entry.state is JobState.READING:
                # The KV is computed. If it cannot be read, the prompt is computed here. So no other
                # writer is needed, and the lost one cannot ack the message.
                if entry.writer == writer:
                    self._forget_message(entry)
            elif entry.state is JobState.QUEUED and entry.to == writer:
                self._give_up(entry, Outcome.PREFILL_LOST)  # nobody else gets it
            elif entry.state is JobState.GRANTED and entry.writer == writer:
                ack_subject, entry.losses = entry.ack_subject, entry.losses + 1
                self._revoke(entry, Outcome.PREFILL_LOST, requeue=True)
                if not entry.settled and ack_subject:
                    # The lost worker may be dead, so we nak its delivery.
                    self._actions.append(NakDelivery(ack_subject, entry.receipt))

    def _give_up(self, entry: Entry, outcome: Outcome) -> None:
        """Settle the request without the remote result, and close the job."""
        if entry.state is JobState.GRANTED or entry.reading:
            self._revoke(entry, outcome, requeue=False)
        if not entry.settled:
            if entry.state is JobState.QUARANTINED:
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
        entry.quarantined_at = self.clock.monotonic()
        revoke = Revoke(job_id=entry.job_id, attempt=entry.attempt, reason=str(reason))
        self._actions.append(SendRevoke(entry.writer, revoke))
        self._ask_proof(entry)
        last = entry.attempt >= MAX_ATTEMPTS or entry.losses > 1 or entry.to
        if requeue and last and not entry.settled:
            lost = reason == Outcome.PREFILL_LOST
            self._give_up(entry, Outcome.PREFILL_LOST if lost else Outcome.PREFILL_FAILED)
        if entry.state is JobState.QUARANTINED:
            self._look_by(entry.quarantined_at + _ask_again_s(0.0))

    def _ask_proof(self, entry: Entry) -> None:
        """If nobody can write to the blocks any more, the job is QUEUED, or closed."""
        if entry.reading:
            return
        if entry.fence is not None and not self.fences.try_revoke(entry.fence):
            return
        entry.fence, entry.writer = None, ""
        entry.queued_at = self.clock.monotonic()
        self._enter(entry, JobState.QUEUED)
        self._quarantined.pop(entry.job_id, None)
        if entry.settled:
            self._events.append(Release(entry.job_id))
            self._close(entry, JobState.CLOSED)
        else:
            self._look_by(entry.due)

    # ------------------------------------------------------------------ settle, close

    def _settle(self, entry: Entry, outcome: Outcome) -> None:
        assert not entry.settled, "a request is settled once"
        entry.settled = True
        entry.features = b""  # nobody is granted the job any more
        self.claims.ended(entry.job_id)
        self._events.append(Settle(entry.request_id, outcome))

    def _close(self, entry: Entry, state: JobState) -> None:
        self._enter(entry, state)
        self._count(entry, -1)
        del self._jobs[entry.job_id]
        self._ended[entry.job_id] = state
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def _enter(self, entry: Entry, state: JobState) -> None:
        """Change the state of a job."""
        assert state in _NEXT[entry.state], f"{entry.state} -> {state}"
        self._count(entry, -1)
        entry.state = state
        self._count(entry, 1)

    def _count(self, entry: Entry, sign: int) -> None:
        """Add a job to the sums (sign 1), or subtract it (-1).

        Before a change of a job, subtract it. After the change, add it again."""
        sums = self._sums
        sums.jobs[entry.state] += sign
        sums.queued_tokens += sign * entry.tokens if entry.state is JobState.QUEUED else 0
        sums.uncomputed += sign * entry.uncomputed
        sums.unwritten += sign * entry.unwritten
        sums.targets += sign * entry.targets

    # ------------------------------------------------------------------ time

    @locked
    def tick(self) -> float | None:
        """Ask again for proofs, and give up what is past its deadline.

        Returns the seconds until the next call is useful. None: nothing is open."""
        now = self.clock.monotonic()
        for entry in list(self._quarantined.values()):
            self._ask_proof(entry)
        # A job is due later once it is claimed or moves. So this looks at all jobs, but seldom.
        if now >= self._next_look or not self._jobs:
            for entry in list(self._jobs.values()):
                if not entry.settled and entry.due <= now:
                    self._expire(entry)
            dues = [entry.due for entry in self._jobs.values() if not entry.settled]
            for entry in self._quarantined.values():
                dues.append(now + _ask_again_s(now - entry.quarantined_at))
            self._next_look = min(dues, default=math.inf)
        return None if self._next_look == math.inf else self._next_look - now

    def tick_overdue(self) -> None:
        """Call `tick` if its own thread should have done so a second ago: that one hangs
        (docs/failure-modes.md). An error is logged, and the next call tries again."""
        if self.clock.monotonic() > self._next_look + 1.0:
            try:
                self.tick()
            except Exception:
                logger.exception("a tick of the ledger failed; the next one tries again")

    def _look_by(self, at: float) -> None:
        """Have `tick` look at all jobs then, if not earlier."""
        if at < self._next_look:
            self._next_look, self._earlier = at, True

    def _expire(self, entry: Entry) -> None:
        """The job has been in its state for too long. The outcome tells which state that was."""
        if entry.state is JobState.QUEUED:
            self._nobody_claimed(entry)
            return
        early = self.clock.monotonic() < entry.deadline  # then its writer is not proved quiet
        self._give_up(entry, Outcome.QUARANTINED if early else Outcome.TIMEOUT)

    def _nobody_claimed(self, entry: Entry) -> None:
        """Serve the job locally. If that opens the breaker, serve every queued job locally.

        A job that was published late does not count: it had less time to be claimed."""
        # Nearly all of that time: the deadline counts from `open`, and may be the nearer bound.
        most = 0.8 * min(entry.claim_timeout_s, entry.timeout_s)
        counts = not entry.to and self.clock.monotonic() - entry.queued_at >= most
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
        return self._taken(self._events)

    def take_actions(self) -> list[Action]:
        """What the asyncio thread must send. Empties the queue."""
        return self._taken(self._actions)

    def _taken(self, queue: deque[T]) -> list[T]:
        if not queue:
            return []
        with self._lock:
            taken = list(queue)
            queue.clear()
        return taken

    def _wake(self) -> None:
        """Wake the threads for which something is queued. Called without the lock."""
        if self._events:
            self.on_event()
        if self._actions or self._earlier:
            self._earlier = False  # before the call: another thread may set it meanwhile
            self.on_action()

    # ------------------------------------------------------------------ views

    def find(self, job_id: str) -> Entry | None:
        return self._jobs.get(job_id)

    def unclaimed(self) -> list[Any]:
        """Return the queue's receipts of the jobs that wait for a claim."""
        with self._lock:
            entries = list(self._jobs.values())
        # Without the lock, for which the engine thread waits. `give_up` looks again.
        return [e.receipt for e in entries if e.state is JobState.QUEUED and e.receipt is not None]

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
            return self.clock.monotonic(), list(itertools.islice(self._jobs.values(), limit))

    def sums(self) -> Sums:
        with self._lock:
            return replace(self._sums, jobs=self._sums.jobs.copy())

    @property
    def quarantined_blocks(self) -> int:
        """Number of blocks whose writer was told to stop and is not proved quiet."""
        with self._lock:
            return sum(len(entry.blocks) for entry in self._quarantined.values())
