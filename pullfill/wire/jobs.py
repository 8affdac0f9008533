"""The job on the queue: one remote prefill."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pullfill.wire.codec import WIRE_VERSION, Count, Id, Message, Text, Version

Positions = Annotated[tuple[Count, ...], Meta(min_length=1, max_length=256)]


class Adapter(Message, frozen=True, kw_only=True):
    """The LoRA adapter of a request. content: digest of its files (`engine.adapters.content`)."""

    name: Text
    path: Text
    content: Id


class PrefillJob(Message, frozen=True, kw_only=True):
    """One remote prefill, as published on the job stream.

    token_ids: the prompt tokens whose KV is wanted, raw little-endian u32.
    hit_tokens: leading tokens whose KV the decode worker already holds (a block multiple).
    block_ids: decode-side blocks of all `token_ids` (hit blocks first), raw little-endian u32. The
    blocks of the first `hit_tokens` may be read, the others are written. A grant must confirm them.
    read_from: for each KV cache group, the position in the prompt of its first block that may be
    read. A position counts blocks. See engine/groups.py for the order.
    kept_from: the same for blocks that are written.
    features: digest of the multimodal inputs that the grant brings. Empty: there are none.
    priority: in the prefill worker's engine. The smallest comes first.
    request_id: for dead letters, traces and logs, which people read.
    timeout_s: how long from publish the decode worker waits before it serves locally.
    trace: W3C `traceparent` of the remote prefill. Empty: it is not traced.
    """

    v: Version = WIRE_VERSION
    job_id: Id
    incarnation: Id
    decode_instance: Id
    request_id: Text
    compat: Id
    token_ids: bytes
    hit_tokens: Count
    block_ids: bytes
    read_from: Positions = (0,)
    kept_from: Positions = (0,)
    cache_salt: Text | None = None
    adapter: Adapter | None = None
    features: Text = ""
    priority: int = 0
    timeout_s: Annotated[float, Meta(gt=0, le=1e9)]
    trace: Text = ""
