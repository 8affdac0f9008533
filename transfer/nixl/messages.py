"""What the two sides of a nixl backend say on the connection, once per batch (docs/wire.md).

peer   NixlRuns: where its bytes of this batch are
owner  NixlMoved, once it has read or written them all (or, discarding, touched none)
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pullfill.wire.codec import WIRE_VERSION, Count, Message, Version

MAX_METADATA = 1 << 20
MAX_RUNS = 8 << 20
"""Bytes of a run list: half a million runs."""
MAX_FRAME = MAX_METADATA + MAX_RUNS + 4096


class NixlRuns(Message, tag="nixl_runs", frozen=True, kw_only=True):
    """Where the peer's bytes of a batch are.

    generation: the number of the peer's agent.
    metadata: of that agent, with its first batch on this connection.
    device: that holds the peer's memory. -1: the CPU.
    iovec: pairs of little-endian u64, address and bytes.
    """

    v: Version = WIRE_VERSION
    generation: Count
    metadata: Annotated[bytes, Meta(max_length=MAX_METADATA)] = b""
    device: Annotated[int, Meta(ge=-1, le=1023)] = -1
    iovec: Annotated[bytes, Meta(max_length=MAX_RUNS)]


class NixlMoved(Message, tag="nixl_moved", frozen=True, kw_only=True):
    """The owner is done with the batch."""

    v: Version = WIRE_VERSION
