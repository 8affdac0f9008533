"""What two decode workers say to each other when one reads the other's cached prefix.

The *asker* connects to the *holder*'s control server. A read lease pins cached blocks of the
holder for a moment, so that the asker can copy them. `ToHolder` and `ToAsker` list what each side
may send.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pullfill.wire.codec import WIRE_VERSION, Count, Id, Message, Text, Version
from pullfill.wire.control import FenceToken, Goodbye
from pullfill.wire.jobs import Adapter
from pullfill.wire.records import RegionDescriptor


class PrefixHolder(Message, frozen=True, kw_only=True):
    """A frontend's hint that travels with a request: another decode worker holds its prefix.

    control: address of that worker's control server.
    tokens: how many leading tokens of the prompt it holds, as far as the frontend knows."""

    instance_id: Id
    control: Text
    tokens: Count


class LeaseHello(Message, tag="lease_hello", frozen=True, kw_only=True):
    """First message of an asker.

    compat: compatibility hash. computes: digest of what decides how the asker rounds
    (`engine.compat.rounding_digest`). Both must be the holder's own."""

    v: Version = WIRE_VERSION
    decode_instance: Id
    compat: Id
    computes: Text


class LeaseWelcome(Message, tag="lease_welcome", frozen=True, kw_only=True):
    """The holder accepts the connection. regions: its KV memory, one region for each rank."""

    v: Version = WIRE_VERSION
    decode_instance: Id
    regions: tuple[RegionDescriptor, ...]


class LeaseAsk(Message, tag="lease_ask", frozen=True, kw_only=True):
    """Ask for a lease of the cached blocks of a prompt.

    token_ids: the prompt's first tokens, raw little-endian u32.
    start: how many of them the asker holds itself. A block multiple.
    cache_salt, adapter: what else the KV depends on."""

    rid: Count
    token_ids: bytes
    start: Count
    cache_salt: Text | None = None
    adapter: Adapter | None = None


class Lease(Message, tag="lease", frozen=True, kw_only=True):
    """The right to read some blocks, until the asker ends it or `within_s` have passed.

    lease: its number on this connection.
    block_ids: the holder's blocks from `start` on, as many as are cached in a row, raw u32.
    fence: refuses every read after the lease has ended."""

    rid: Count
    lease: Count
    block_ids: bytes
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
ToAsker = LeaseWelcome | Goodbye | Lease | NoLease | LeaseEnded
