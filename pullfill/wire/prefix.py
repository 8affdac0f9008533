"""What a decode worker tells a frontend about its prefix cache, and what the frontend asks for.

Every change of one block has a number, counted from 0 in an *epoch*: the life of one `Original`
(prefix/events.py).
"""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta

from pullfill.wire.codec import WIRE_VERSION, Count, Message, Version

# Most block events, or hashes, in one message: 18 KiB. The index takes in as many in 1 ms.
MAX_EVENTS = 2048

U63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Ops = Annotated[bytes, Meta(max_length=MAX_EVENTS)]
# Block hashes (prefix/chain.py), little-endian u64.
HashBytes = Annotated[bytes, Meta(max_length=8 * MAX_EVENTS)]


class Op(enum.IntEnum):
    """What happened to a block, one byte on the wire."""

    REMOVE = 0
    STORE = 1
    # All blocks are gone. Its hash is 0.
    CLEAR = 2


class PrefixEvents(Message, tag="prefix_events", frozen=True, kw_only=True):
    """Block events first .. first + len(ops) - 1. Without events: nothing happened since."""

    v: Version = WIRE_VERSION
    epoch: U63
    first: Count
    # One `Op` for each event.
    ops: Ops
    # One hash for each event.
    hashes: HashBytes
    # How many blocks the worker holds after these events, and the low 63 bits of their hashes
    # xored. None when the worker has gone on meanwhile.
    held: Count | None = None
    digest: U63 = 0


class PrefixPage(Message, tag="prefix_page", frozen=True, kw_only=True):
    """One page of a snapshot. A follower that has all pages applies all events from `at` on."""

    v: Version = WIRE_VERSION
    epoch: U63
    at: Count
    # Counted from 0.
    page: Count
    # Whether no page follows.
    last: bool
    hashes: HashBytes


class PrefixFollow(Message, tag="prefix_follow", frozen=True, kw_only=True):
    """A frontend wants a snapshot, and all events from then on."""

    v: Version = WIRE_VERSION
