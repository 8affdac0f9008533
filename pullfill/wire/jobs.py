"""The job on the queue: one remote prefill."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pullfill.wire.codec import WIRE_VERSION, Count, Id, Message, Text, Version


class PrefillJob(Message, frozen=True, kw_only=True):
    """One remote prefill, as published on the job stream.

    token_ids: the prompt tokens whose KV is wanted, raw little-endian u32.
    hit_tokens: leading tokens whose KV the decode worker already holds (a block multiple).
    block_ids: decode-side blocks of all `token_ids` (hit blocks first), raw little-endian u32. The
    first `hit_tokens // block_size` may be read, the others are written. A grant must confirm them.
    request_id: for people who read a dead letter.
    timeout_s: how long from publish the decode worker waits before it serves locally.
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
    block_size: Annotated[int, Meta(ge=1)]
    cache_salt: Text | None = None
    priority: int = 0
    timeout_s: Annotated[float, Meta(gt=0, le=1e9)]
