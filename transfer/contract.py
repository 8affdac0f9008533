"""What every transport promises. No torch here: memory is an address, a size and strides.

Two sides. The *owner* (decode worker) registers its KV memory, opens a fence for each grant and
revokes it. The *peer* (prefill worker) connects to an owner's region and reads or writes blocks
under a fence. Blocks are opaque bytes per (layer, block, KV head).

The one promise everything stands on: after `OwnerFences.try_revoke` returned True for a fence, no
byte can be written (and no read be believed) under that fence any more, whatever the peer does.
Time is never the proof.

Threads: `PeerSession.read_blocks/write_blocks` block the caller and may run on any one thread at a
time per session, `interrupt` from any; the owner side is thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pullfill.wire import FenceToken, RegionDescriptor

Direction = Literal["write", "read"]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How (layer, block, KV head) maps to bytes inside one allocation. All in bytes but counts.

    A head's page is `page_bytes` contiguous bytes. Strides may be larger than what they hold.
    """

    base_offset: int
    num_layers: int
    num_blocks: int
    num_kv_heads: int
    page_bytes: int
    layer_stride: int
    block_stride: int
    head_stride: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers and heads."""
        return self.num_layers * self.num_kv_heads * self.page_bytes


@dataclass(frozen=True, slots=True)
class LocalMemory:
    """One rank's KV memory as this process sees it: `address` is where `layout.base_offset` counts
    from. `first_head`, `first_layer`: where its heads and layers are in the whole model. `device`:
    this process's number of the CUDA device that holds it; None: the CPU can touch it."""

    address: int
    nbytes: int
    layout: KvLayout
    first_head: int = 0
    first_layer: int = 0
    device: int | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """Which KV heads and layers of two regions hold the same thing: `heads` heads from
    `local_head` here and `remote_head` there, and layers alike. Both are counted from each
    region's own first one. `topology.py` makes them when tensor- or pipeline-parallel sizes
    differ; without one, a session moves whole blocks of regions that are alike."""

    local_head: int
    remote_head: int
    heads: int
    local_layer: int
    remote_layer: int
    layers: int

    def swapped(self) -> Part:
        """The same, seen from the other side."""
        return Part(
            self.remote_head, self.local_head, self.heads,
            self.remote_layer, self.local_layer, self.layers,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MoveResult:
    """One finished read or write."""

    blocks: int
    nbytes: int
    seconds: float
    runs: int


class OwnerFences(Protocol):
    """The decode worker's side: fences over its own region."""

    def open(self, block_ids: Sequence[int], first_target: int = 0) -> FenceToken:
        """A fence valid from now on: all of `block_ids` may be read, `block_ids[first_target:]`
        written. A transport whose owner moves the bytes refuses anything else. Mapped memory (shm,
        cuda_ipc) cannot: there the peer is trusted to keep to its grant. Raises OverloadedError
        when all slots are in use, ConfigError when a block is not in the region."""
        ...

    def try_revoke(self, token: FenceToken) -> bool:
        """Invalidate the fence. True: proved, nothing can land any more and the slot is free
        for reuse. False: a batch of the writer is under way (or its process is stopped); the
        fence is already dying: it refuses every *new* batch where the transport can, and the
        caller asks again. Idempotent. Never blocks longer than a few microseconds.

        Every token ends this way, committed ones too: that is what frees the slot."""
        ...

    @property
    def in_use(self) -> int:
        """Slots not free: open, or dying and not yet proved."""
        ...

    def close(self) -> None:
        """Refuse every session's next batch. Proves nothing; `open` and `try_revoke` raise
        ConfigError afterwards."""
        ...


class Owner(Protocol):
    """The registered KV memory of one worker that peers can reach: a region for each rank, and
    one set of fences over all of them (a block id means the same block in every rank)."""

    def endpoints(self, rank: int = 0) -> dict[str, str]:
        """What goes into `RegionDescriptor.endpoints` of this rank: transport name -> address."""
        ...

    @property
    def fences(self) -> OwnerFences: ...

    def renew(self, incarnation: str) -> None:
        """The owner registered again: sessions and descriptors of the old incarnation are refused
        from now on. Fences stay as they are; each still ends by `try_revoke`."""
        ...

    def close(self) -> None:
        """Unregister and remove what peers could open. Mapped peers keep harmless pages."""
        ...


class PeerSession(Protocol):
    """A prefill worker's connection to one region of one decode worker."""

    @property
    def transport(self) -> str: ...

    @property
    def moved_bytes(self) -> int:
        """Bytes of all batches that were copied or sent so far, including those of a running move.

        It never decreases. While it grows, the link is alive. Any thread may read it."""
        ...

    def write_blocks(
        self, fence: FenceToken, source: Sequence[int], target: Sequence[int]
    ) -> MoveResult:
        """Copy local blocks `source[i]` to remote blocks `target[i]`, all layers and heads.

        Done in bounded batches; each batch checks the fence while holding it. Returns when all
        bytes are in the owner's memory. Raises Fenced (the batch that found the fence dead moved
        nothing; earlier batches may have landed, before the revoke was proved), TransferFailed,
        and BadMessage before anything moved: ids out of range, lengths differ, a target twice.
        """
        ...

    def read_blocks(
        self, fence: FenceToken, source: Sequence[int], target: Sequence[int]
    ) -> MoveResult:
        """Copy remote blocks `source[i]` into local blocks `target[i]`, same rules; after Fenced
        the local target blocks hold garbage and must not be used."""
        ...

    def move_now(
        self, verb: Direction, fence: FenceToken, source: Sequence[int], target: Sequence[int]
    ) -> MoveResult | None:
        """As `write_blocks` or `read_blocks`, for callers that must not wait.

        Moves the blocks if that takes less than a millisecond and waits for nobody. Otherwise
        returns None, and nothing was moved."""
        ...

    def interrupt(self) -> None:
        """For good, from any thread, never blocks: a move that waits for the owner ends soon with
        TransferFailed, and so does every later one. Does nothing where no move waits for it (mapped
        memory). `close` is still needed."""
        ...

    def close(self) -> None: ...


class PeerTransport(Protocol):
    """One way of moving blocks, from the prefill worker's side."""

    name: str

    def can_reach(self, descriptor: RegionDescriptor) -> str | None:
        """None if it can; else why not, for people."""
        ...

    def connect(
        self, local: LocalMemory, descriptor: RegionDescriptor, part: Part | None = None
    ) -> PeerSession:
        """Map or dial the region; the session moves `part` of each block (None: all of it, and
        both sides must be alike). Raises IncompatibleError (field named), PeerUnavailable (gone,
        or of another incarnation: load its descriptor again), BadMessage (the descriptor
        contradicts itself), TransferFailed."""
        ...
