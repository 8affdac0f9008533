"""What two workers say to each other: the job on the queue, the control channel, read leases.

`ToDecode` and `ToPrefill` list what each side of the control channel may send. A read lease pins
cached blocks of a decode worker (the *holder*) for a moment, so that another one (the *asker*) can
copy them. The asker connects to the holder's control server. `ToHolder` and `ToAsker` list what
each side may send there.
"""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta

from pullfill.wire.codec import WIRE_VERSION, Count, Finite, Id, Message, Text, Version
from pullfill.wire.records import RegionDescriptor

Positions = Annotated[tuple[Count, ...], Meta(min_length=1, max_length=256)]


class Adapter(Message, frozen=True, kw_only=True):
    """The LoRA adapter of a request. content: digest of its files (`engine.adapters.content`)."""

    name: Text
    path: Text
    content: Id


class PrefillJob(Message, frozen=True, kw_only=True):
    """One remote prefill, as published on the job stream."""

    v: Version = WIRE_VERSION
    job_id: Id
    incarnation: Id
    decode_instance: Id
    # For dead letters, traces and logs, which people read.
    request_id: Text
    compat: Id
    # The prompt tokens whose KV is wanted, raw little-endian u32.
    token_ids: bytes
    # Leading tokens whose KV the decode worker already holds (a block multiple).
    hit_tokens: Count
    # Decode-side blocks of all `token_ids` (hit blocks first), raw little-endian u32. The blocks of
    # the first `hit_tokens` may be read, the others are written. A grant must confirm them.
    block_ids: bytes
    # For each KV cache group, the position in the prompt of its first block that may be read. A
    # position counts blocks. See engine/groups.py for the order.
    read_from: Positions = (0,)
    # The same for blocks that are written.
    kept_from: Positions = (0,)
    cache_salt: Text | None = None
    adapter: Adapter | None = None
    # Digest of the multimodal inputs that the grant brings. Empty: there are none.
    features: Text = ""
    # As the client named it. The smallest comes first in the prefill worker's engine.
    priority: int = 0
    # How long from publish the decode worker waits before it serves locally.
    timeout_s: Annotated[float, Meta(gt=0, le=1e9)]
    # In how many seconds from publish the first token of the request is late.
    due_s: Annotated[float, Meta(ge=-1e9, le=1e9)] = 0.0
    # W3C `traceparent` of the remote prefill. Empty: it is not traced.
    trace: Text = ""


ALIVE_INTERVAL_S = 1.0
SILENT_S = 5.0


class RefuseReason(enum.StrEnum):
    """Why a claim got no grant."""

    UNKNOWN_JOB = "unknown_job"
    STALE_INCARNATION = "stale_incarnation"
    COMMITTED = "committed"
    CLOSED = "closed"
    # It cannot be granted now, but soon: claim again after `retry_after_s`.
    HELD = "held"
    # Another prefill worker, which is alive, works on it: forget this delivery, settle nothing.
    IN_PROGRESS = "in_progress"


class KvMode(enum.StrEnum):
    """How KV comes into the decode worker's blocks. Its choice, said in each grant."""

    # The prefill worker writes each chunk while it computes the next one.
    PUSH_ASYNC = "push_async"
    # It keeps the blocks until the decode worker has read them.
    PULL = "pull"


class FenceToken(Message, frozen=True, kw_only=True):
    """The right to touch a grant's blocks: valid while slot `slot` holds `epoch`."""

    slot: Count
    epoch: Annotated[int, Meta(ge=0, le=2**63 - 1)]


Secret32 = Annotated[bytes, Meta(min_length=32, max_length=32)]


class AuthHello(Message, tag="auth_hello", frozen=True, kw_only=True):
    """Comes before `Hello` where there is a cluster key (`net/handshake.py`)."""

    v: Version = WIRE_VERSION
    nonce: Secret32


class AuthChallenge(Message, tag="auth_challenge", frozen=True, kw_only=True):
    """The decode worker's nonce, and its proof over both."""

    nonce: Secret32
    proof: Secret32


class AuthProof(Message, tag="auth_proof", frozen=True, kw_only=True):
    """The prefill worker's proof. Every frame after it is sealed, in both directions."""

    proof: Secret32


class Hello(Message, tag="hello", frozen=True, kw_only=True):
    """First message of a prefill worker on a control connection."""

    v: Version = WIRE_VERSION
    prefill_instance: Id
    compat: Id
    # The worker's own KV memory, one region for each rank, for decode workers that pull. Empty:
    # nobody can read it.
    regions: tuple[RegionDescriptor, ...] = ()
    # Digest of what decides how this worker rounds (`engine.compat.rounding_digest`). Empty: its
    # prefills are never checked.
    computes: Text = ""
    # Whether it can load LoRA adapters.
    adapters: bool = False
    # Whether it takes multimodal inputs.
    features: bool = False
    # Length of the longest prompt that it takes. 0: it takes all of this decode worker's.
    max_prompt_tokens: Count = 0
    # Why it pulls no jobs now, as in `Heartbeat`. Empty: it pulls.
    why: Text = ""


class Welcome(Message, tag="welcome", frozen=True, kw_only=True):
    """The decode worker accepts the connection.

    regions: its KV memory, one region for each rank. Empty: nobody can reach it."""

    v: Version = WIRE_VERSION
    decode_instance: Id
    regions: tuple[RegionDescriptor, ...] = ()


class Goodbye(Message, tag="goodbye", frozen=True, kw_only=True):
    """The decode worker refuses the connection; `reason` is for people."""

    reason: Text


class Load(Message, frozen=True, kw_only=True):
    """The load of a prefill worker."""

    # Prompt tokens that it computes in a second of work, beside the streams that it has now. 0: it
    # has computed none yet.
    tokens_per_s: Finite = 0.0
    # What a second of that work costs its streams, in requests that miss a target.
    harm: Finite = 0.0
    # Tokens that are computed and belong to jobs that are not committed.
    done_tokens: Count = 0


class Claim(Message, tag="claim", frozen=True, kw_only=True):
    """Ask for a grant.

    ack_subject: with it the decode worker naks the delivery if this prefill worker dies."""

    rid: Count
    job_id: Id
    incarnation: Id
    ack_subject: Text = ""
    load: Load = Load()


class Grant(Message, tag="grant", frozen=True, kw_only=True):
    """The right to write the job's blocks, and to read the blocks of its prefix hit.

    It holds for at most `deadline_s` from receipt, while `fence` is valid."""

    rid: Count
    job_id: Id
    attempt: Annotated[int, Meta(ge=1)]
    incarnation: Id
    deadline_s: Finite
    # In how many seconds from the grant the first token is late. None: not told.
    due_s: Finite | None = None
    # Digest of the published body, which includes the block IDs. A prefill worker whose body has
    # another digest must touch no block.
    job_digest: bytes
    fence: FenceToken
    # How the KV gets into the blocks. With `pull` the prefill worker writes nothing and sends
    # `Ready`.
    mode: KvMode = KvMode.PUSH_ASYNC
    # The prompt's multimodal inputs (`engine.features.encode`).
    features: bytes = b""


class Refused(Message, tag="refused", frozen=True, kw_only=True):
    """No grant.

    retry_after_s: claim again after this time. None: do not claim again, and ack the delivery. With
    the reason `in_progress` do not ack it either: the worker that holds the job will."""

    rid: Count
    reason: RefuseReason
    retry_after_s: Finite | None = None


class StageTimings(Message, frozen=True, kw_only=True):
    """What the prefill worker measured for one attempt, in milliseconds.

    tail_ms: from the end of the last chunk's computation to the commit."""

    claim_ms: Finite = 0.0
    prefix_read_ms: Finite = 0.0
    prefill_ms: Finite = 0.0
    kv_write_ms: Finite = 0.0
    tail_ms: Finite = 0.0


class Commit(Message, tag="commit", frozen=True, kw_only=True):
    """All blocks of the attempt are written."""

    rid: Count
    job_id: Id
    attempt: Count
    incarnation: Id
    # Number of blocks written.
    blocks: Count
    kv_bytes: Count
    timings: StageTimings
    # Name of the transport that carried the KV.
    transport: Text = ""
    # "name: reason" for each better transport, for people.
    why_not_better: tuple[Text, ...] = ()
    load: Load = Load()


class Ready(Message, tag="ready", frozen=True, kw_only=True):
    """Pull mode: all blocks of the attempt are computed and may be read.

    The answer is a `CommitReply`, once the blocks are read or not needed."""

    rid: Count
    job_id: Id
    attempt: Count
    incarnation: Id
    # The prefill worker's own blocks, in the order of the prompt.
    block_ids: bytes
    # The right to read them.
    fence: FenceToken
    timings: StageTimings
    load: Load = Load()


class CommitReply(Message, tag="commit_reply", frozen=True, kw_only=True):
    """Answer to `Commit` and `Ready`. ok: whether the KV will be used."""

    rid: Count
    ok: bool
    reason: Text = ""


class Progress(Message, tag="progress", frozen=True, kw_only=True):
    """A part of the attempt was computed or copied since the last one. Extends its deadline."""

    job_id: Id
    attempt: Count
    incarnation: Id
    # Number of blocks written since then.
    blocks: Count = 0
    # Seconds that these writes took.
    write_s: Finite = 0.0


class GiveUp(Message, tag="give_up", frozen=True, kw_only=True):
    """The attempt is given up, and its writer is quiet. retry: another attempt may succeed."""

    job_id: Id
    attempt: Count
    incarnation: Id
    cause: Text
    retry: bool


class Revoke(Message, tag="revoke", frozen=True, kw_only=True):
    """Stop the attempt."""

    job_id: Id
    attempt: Count
    reason: Text


class DrainAck(Message, tag="drain_ack", frozen=True, kw_only=True):
    """Older builds say it when nothing copies for a revoked attempt any more."""


class Draining(Message, tag="draining", frozen=True, kw_only=True):
    """The prefill worker drains: it pulls no more jobs, and finishes those it was granted."""


class Heartbeat(Message, tag="heartbeat", frozen=True, kw_only=True):
    """A prefill worker sends it regularly (net/peer_link.py), and the decode worker returns it.

    Each side treats the other as gone when it hears nothing for SILENT_S."""

    # Why the prefill worker pulls no jobs of this decode worker, for people: its engine is stuck,
    # NATS does not answer it, the self-check has not passed, or its own streams leave no time.
    # Empty: it pulls. A change is sent at once.
    why: Text = ""
    load: Load = Load()


class Trial(Message, tag="trial", frozen=True, kw_only=True):
    """A job of the self-check, encoded as on the stream. Only its receiver runs it."""

    job: bytes


ToDecode = Hello | Claim | Progress | Commit | Ready | GiveUp | DrainAck | Draining | Heartbeat
ToPrefill = Welcome | Goodbye | Grant | Refused | CommitReply | Revoke | Heartbeat | Trial


class PrefixHolder(Message, frozen=True, kw_only=True):
    """A frontend's hint that travels with a request: another decode worker holds its prefix."""

    instance_id: Id
    # Address of that worker's control server.
    control: Text
    # How many leading tokens of the prompt it holds, as far as the frontend knows.
    tokens: Count


class LeaseHello(Message, tag="lease_hello", frozen=True, kw_only=True):
    """First message of an asker."""

    v: Version = WIRE_VERSION
    decode_instance: Id
    # Compatibility hash. It must be the holder's own, and `computes` too.
    compat: Id
    # Digest of what decides how the asker rounds (`engine.compat.rounding_digest`).
    computes: Text


class LeaseAsk(Message, tag="lease_ask", frozen=True, kw_only=True):
    """Ask for a lease of the cached blocks of a prompt."""

    rid: Count
    # The prompt's first tokens, raw little-endian u32.
    token_ids: bytes
    # How many of them the asker holds itself. A block multiple.
    start: Count
    # What else the KV depends on.
    cache_salt: Text | None = None
    adapter: Adapter | None = None


class Lease(Message, tag="lease", frozen=True, kw_only=True):
    """The right to read some blocks, until the asker ends it or `within_s` have passed."""

    rid: Count
    # Its number on this connection.
    lease: Count
    # The holder's blocks from `start` on, as many as are cached in a row, raw u32.
    block_ids: bytes
    # Refuses every read after the lease has ended.
    fence: FenceToken
    within_s: Annotated[float, Meta(gt=0, le=3600)]


class NoLease(Message, tag="no_lease", frozen=True, kw_only=True):
    """The holder gives no lease.

    reason: `not_held`: the blocks are not cached. `busy`: a limit is reached, or a step runs."""

    rid: Count
    reason: Text


class LeaseEnd(Message, tag="lease_end", frozen=True, kw_only=True):
    """The asker has copied the blocks, or does not want them any more. rid 0: no answer is read."""

    rid: Count
    lease: Count


class LeaseEnded(Message, tag="lease_ended", frozen=True, kw_only=True):
    """Answer to `LeaseEnd`. valid: the blocks were pinned until now. If not, no copy counts."""

    rid: Count
    valid: bool


ToHolder = LeaseAsk | LeaseEnd
ToAsker = Welcome | Goodbye | Lease | NoLease | LeaseEnded
