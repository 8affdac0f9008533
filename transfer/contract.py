"""What every transport promises. No torch here: memory is an address, a size and strides.

The *owner* registers its KV memory, opens a fence for each grant and revokes it. The *peer*
connects to a region of the owner, and reads or writes blocks under a fence. The owner is a decode
worker, and the peer a prefill worker or a decode worker that reads a prefix. In pull mode decode
workers read from prefill workers. A block is opaque bytes per layer and KV head.

The one promise: after `ShmFences.try_revoke` returned True for a fence, no byte can be written
under that fence any more, and no read under it is believed, whatever the peer does. Time is never
the proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pullfill.wire import FenceToken, RegionDescriptor

Direction = Literal["write", "read"]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Where the page of each (layer, block, KV head) is in one allocation. A page is contiguous.

    All but the counts is in bytes. Strides may be larger than what they hold.
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
class Rect:
    """A rectangle of KV: some KV heads of some layers, in the numbering of the whole model."""

    first_head: int
    heads: int
    first_layer: int
    layers: int

    @property
    def end_head(self) -> int:
        return self.first_head + self.heads

    @property
    def end_layer(self) -> int:
        return self.first_layer + self.layers

    def holds(self, part: Rect) -> bool:
        """Whether all of `part` is inside."""
        heads = self.first_head <= part.first_head and part.end_head <= self.end_head
        return heads and self.first_layer <= part.first_layer and part.end_layer <= self.end_layer

    def within(self, region: Rect) -> Rect:
        """The same rectangle, counted from the first head and the first layer of a region."""
        return Rect(
            self.first_head - region.first_head, self.heads,
            self.first_layer - region.first_layer, self.layers,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LocalMemory:
    """One rank's KV memory as this process sees it.

    address: what `layout.base_offset` counts from.
    first_head, first_layer: the number of its first KV head and layer in the whole model.
    device: this process's number of the CUDA device that holds it. None: the CPU can touch it.
    """

    address: int
    nbytes: int
    layout: KvLayout
    first_head: int = 0
    first_layer: int = 0
    device: int | None = None

    @property
    def freed_at_exit(self) -> bool:
        """Whether the end of this process frees it, also under a read of another process.

        A file in shared memory stays as it is for those who map it. GPU memory does not."""
        return self.device is not None

    @property
    def rect(self) -> Rect:
        """What it holds of the whole model."""
        layout = self.layout
        return Rect(self.first_head, layout.num_kv_heads, self.first_layer, layout.num_layers)


class PeerSession(Protocol):
    """A prefill worker's connection to one region of one decode worker.

    `move` blocks the caller. Any thread may call it, one at a time. Any thread may call `interrupt`
    at any time."""

    transport: str

    @property
    def moved_bytes(self) -> int:
        """Bytes of all batches that were copied or sent so far, including those of a running move.

        It never decreases. While it grows, the connection is alive. Any thread may read it."""
        ...

    def move(
        self, verb: Direction, fence: FenceToken, source: Sequence[int], target: Sequence[int]
    ) -> int:
        """Copy blocks `source[i]` to `target[i]`, all layers and heads. Returns how many bytes
        that was, once all are there.

        verb: `write` copies local blocks to remote ones, `read` remote blocks to local ones.

        The blocks move in bounded batches. Each batch holds the fence and checks it.

        Raises Fenced when a batch found the fence dead, TransferFailed, and, before anything moved,
        BadMessage when an id is out of range, the lengths differ or a target appears twice."""
        # A fenced batch moved nothing. Earlier ones may have landed, before the revoke was proved.
        # After a fenced read the local target blocks hold garbage.
        ...

    def interrupt(self) -> None:
        """End a move that waits for the owner: it raises TransferFailed soon, and so does every
        later move. Never blocks; any thread. `close` is still needed. The default does nothing: it
        is for mapped memory, where no move waits for the owner."""
        return None

    def close(self) -> None: ...


class PeerTransport(Protocol):
    """One way of moving blocks, from the peer's side."""

    name: str

    def can_reach(self, descriptor: RegionDescriptor) -> str | None:
        """Why it cannot reach the region, for people. None: it can."""
        ...

    def connect(
        self, local: LocalMemory, descriptor: RegionDescriptor, part: Rect | None = None
    ) -> PeerSession:
        """Map or dial the region.

        part: what the session moves of each block. None: all that we hold.

        Raises IncompatibleError (it names the field), PeerUnavailable (the region is gone, or has
        another incarnation by now), BadMessage (the descriptor contradicts itself) and
        TransferFailed."""
        ...
