"""What a peer and the owner's thread say to each other on a stream connection (docs/wire.md).

A frame is a u32 length and a body. Frames are sealed where there is a cluster key. After the hello,
each operation is: an `Operation` from the peer; then batches, each after one mark byte, through the
backend; then one `Answer` from the owner.

    write   peer: BATCH payload BATCH payload ...          owner: Answer (early if it refuses; the
            peer then sends STOP in place of its next batch, and what was sent is thrown away)
    read    owner: BATCH payload BATCH payload ... ANSWER Answer
"""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta

from pullfill.transfer.contract import Direction
from pullfill.wire import FenceToken
from pullfill.wire.codec import WIRE_VERSION, Count, Id, Message, Text, Version

BATCH, STOP, ANSWER = b"B", b"S", b"A"

MIN_BATCH, MAX_BATCH = 64 << 10, 64 << 20
MAX_SETUP = 64 << 10
MAX_OPERATION = 16 << 20
"""Bytes of an operation's frame: four million block ids."""

Setup = Annotated[bytes, Meta(max_length=MAX_SETUP)]


class StreamHello(Message, tag="stream_hello", frozen=True, kw_only=True):
    """The first frame of a peer (after the proofs, where there is a cluster key).

    instance_id, incarnation, rank, nbytes, page_bytes: the memory that it wants to reach.
    backend: the name of the transport.
    head, heads, layer, layers: the part of that memory that its operations move, counted from the
    memory's own first head and layer.
    """

    v: Version = WIRE_VERSION
    instance_id: Id
    incarnation: Id
    rank: Count
    backend: Id
    nbytes: Count
    page_bytes: Count
    head: Count
    heads: Count
    layer: Count
    layers: Count
    batch_bytes: Annotated[int, Meta(ge=MIN_BATCH, le=MAX_BATCH)]
    setup: Setup = b""


class StreamWelcome(Message, tag="stream_welcome", frozen=True, kw_only=True):
    """The owner accepts; `setup` is its backend's."""

    setup: Setup = b""


class Why(enum.StrEnum):
    """Why the owner refuses a connection."""

    UNAVAILABLE = "unavailable"
    """Another instance or incarnation answers here, or it is full or leaving."""
    INCOMPATIBLE = "incompatible"
    WRONG = "wrong"
    """The hello names a memory that is not like ours: its descriptor is wrong."""


class StreamGoodbye(Message, tag="stream_goodbye", frozen=True, kw_only=True):
    """The owner refuses the connection.

    reason: for people.
    stale: the instance or incarnation is gone, so none of its grants is valid.
    """

    why: Why
    reason: Text
    stale: bool = False


class Operation(Message, tag="operation", frozen=True, kw_only=True):
    """Move some blocks. No blocks at all is a question: is the token still valid?

    blocks: the owner's ids as raw little-endian u32, ascending (of a write: strictly)."""

    verb: Direction
    fence: FenceToken
    blocks: bytes


class Status(enum.StrEnum):
    DONE = "done"
    FENCED = "fenced"
    REFUSED = "refused"
    """The operation itself is wrong; the owner closes the connection after saying so."""


class Answer(Message, tag="answer", frozen=True, kw_only=True):
    """How an operation ended. After `fenced` the session can go on with another one."""

    status: Status
    reason: Text = ""
