"""What the two sides of a nccl backend say on the connection (docs/wire.md).

For each batch the peer speaks first, before its payload.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pullfill.wire.codec import WIRE_VERSION, Count, Message, Version


class NcclUse(Message, tag="nccl_use", frozen=True, kw_only=True):
    """Announces the next batch.

    generation: the number of the peer's communicator that the batch goes through.
    fresh: make this communicator now. The earlier one is over. When the new one is there, the peer
        announces the batch again.
    message_bytes: of each message. The last one has what is left.
    """

    v: Version = WIRE_VERSION
    generation: Count
    fresh: bool = False
    message_bytes: Annotated[int, Meta(ge=4 << 10, le=64 << 20)]


class NcclStart(Message, tag="nccl_start", frozen=True, kw_only=True):
    """The id under which both sides make the communicator now. The owner is rank 0."""

    v: Version = WIRE_VERSION
    unique_id: Annotated[bytes, Meta(min_length=1, max_length=256)]


class NcclReady(Message, tag="nccl_ready", frozen=True, kw_only=True):
    """The owner queues its half of the batch now. So does the peer, when it hears this."""

    v: Version = WIRE_VERSION
