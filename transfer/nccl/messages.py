"""What the two sides of a nccl backend say on the connection (docs/wire.md). The peer speaks first,
once per batch and before its payload.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pullfill.wire.codec import WIRE_VERSION, Count, Message, Version


class NcclUse(Message, tag="nccl_use", frozen=True, kw_only=True):
    """The next batch goes through the peer's communicator number `generation`, in messages of
    `message_bytes`, the last one of what is left. fresh: the communicator is to be made now;
    whatever came before is over, and the batch is announced once more when it is there."""

    v: Version = WIRE_VERSION
    generation: Count
    fresh: bool = False
    message_bytes: Annotated[int, Meta(ge=4 << 10, le=64 << 20)]


class NcclStart(Message, tag="nccl_start", frozen=True, kw_only=True):
    """The id under which both sides now make the communicator; the owner is rank 0."""

    v: Version = WIRE_VERSION
    unique_id: Annotated[bytes, Meta(min_length=1, max_length=256)]


class NcclReady(Message, tag="nccl_ready", frozen=True, kw_only=True):
    """The owner queues its half of the batch now, and so does the peer: neither GPU waits long."""

    v: Version = WIRE_VERSION
