"""Which workers hold which blocks.

The table itself is in `table`. Here workers get slots of it, and lose them: a worker that is
forgotten leaves its slot, which no lookup sees any more, and `tidy` empties the slot later.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import mmap
import secrets
import time
from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pullfill.prefix import table
from pullfill.prefix.chain import HashArray, Hashes, as_array
from pullfill.prefix.table import SEGMENT, SLOTS

# Words for rows, for each block. A block in more than 4 slots needs 1 word for each 64 slots.
POOL_WORDS = 5
# Segments that `tidy` does between two looks at the clock.
_SWEEP = 8
Ops: TypeAlias = NDArray[np.uint8]
_NO_OPS: Ops = np.empty(0, np.uint8)


def _touched(words: int) -> HashArray:
    """Allocate memory, and touch all of it now.

    numpy asks for huge pages. They make lookups faster, but the first touch of one takes long."""
    memory = np.empty(words, np.uint64)
    memory[:: mmap.PAGESIZE // 8] = 0
    return memory


def _untouched(words: int) -> HashArray:
    """Allocate memory that is taken page by page as it is used, and never in huge pages."""
    memory = mmap.mmap(-1, 8 * words)
    with contextlib.suppress(OSError):  # a kernel that has no huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint64)


def _pairs(flat: NDArray[np.int64]) -> dict[int, int]:
    found = flat.tolist()
    return dict(zip(found[::2], found[1::2], strict=True))


class PrefixIndex:
    """A bounded set of (worker, block hash). A worker is a number that the owner gives.

    max_blocks: how many different blocks are kept at most. Blocks beyond that are refused, which
    `store` and `refused` tell: removals make room again. The table is taken at once: 51
    bytes for each of max_blocks. Blocks at more than 4 workers take up to 40 more, as they come."""

    def __init__(self, max_blocks: int) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be at least 1, not {max_blocks}")
        # A segment that was just split is half of table.FULL; 1.2 for those that are less.
        segments = 4 + int(1.2 * max_blocks / (table.FULL / 2))
        self._m = table.Memory(
            table=_touched(2 * SEGMENT * (segments + 1)),
            directory=np.zeros(8 << segments.bit_length(), np.int64),
            segments=np.zeros(2 * segments, np.int64),
            pool=_untouched(POOL_WORDS * max_blocks + 64),
            meta=np.zeros(table.META, np.int64),
            slots=np.zeros(2 * SLOTS, np.uint64),
        )
        self._m.meta[table.LIMIT] = max_blocks
        for secret in (table.K1, table.K2):
            self._m.meta[secret] = secrets.randbits(63) | 1
        self._out = np.empty(2 * SLOTS + 1, np.int64)
        self._names = np.zeros(SLOTS, np.int64)
        self._page = np.empty(_SWEEP * SEGMENT, np.uint64)
        self._seen = np.zeros(3, np.uint64)
        self.clear()
        # numba takes milliseconds for the first call with arguments of each type.
        for one in (bytes(8), np.zeros(1, np.uint64)):
            self.match(one)
            self._change(0, one, 0)
            self._change(0, one, 0, np.frombuffer(bytes(1), np.uint8))

    def clear(self) -> None:
        """Forget all workers, now."""
        self._m.table[: 2 * SEGMENT] = 0
        self._m.directory[0] = 0
        self._m.segments[:2] = 0
        self._m.slots[:] = 0
        meta = self._m.meta
        meta[[table.DEPTH, table.BLOCKS, table.BUMP]] = 0
        meta[table.USED] = 1
        meta[table.FREE :] = -1
        self._seen[:] = 0
        self._slots: dict[int, int] = {}
        self._staged: dict[int, int] = {}
        self._refused: dict[int, int] = {}
        self._free: list[int] = []
        self._used = 0
        self._dead: deque[int] = deque()
        self._at = self._turn = 0

    def store(self, worker: int, hashes: Hashes) -> int:
        """The worker holds these blocks now. Returns how many were refused, for want of room."""
        return self._change(self._slot(worker), hashes, 1)

    def remove(self, worker: int, hashes: Hashes) -> None:
        """The worker holds these blocks no more. Unknown ones are ignored."""
        if worker in self._slots:
            self._change(self._slots[worker], hashes, 0)

    def apply(self, worker: int, ops: bytes | memoryview, hashes: Hashes) -> int:
        """Store (ops[i] = 1) or remove (0) hashes[i], in order. Returns how many were refused.

        Raises ValueError if there are not as many ops as hashes."""
        array = as_array(hashes)
        if len(array) != len(ops):
            raise ValueError(f"{len(ops)} ops for {len(array)} hashes")
        return self._change(self._slot(worker), array, 0, np.frombuffer(ops, np.uint8))

    def forget(self, worker: int) -> None:
        """The worker holds nothing any more. Returns at once; `tidy` gives the memory back."""
        slot = self._slots.pop(worker, None)
        if slot is not None:
            self._retire(slot)

    def stage(self, worker: int, hashes: Hashes) -> int:
        """Like `store`, for a snapshot that is not complete: `match` does not see it yet."""
        slot = self._staged.get(worker)
        if slot is None:
            slot = self._staged[worker] = self._take(worker)
        return self._change(slot, hashes, 1)

    def adopt(self, worker: int) -> None:
        """The worker holds exactly what was staged for it. Returns at once, as `forget`."""
        self.forget(worker)
        slot = self._staged.pop(worker, None)
        if slot is not None:
            self._slots[worker] = slot
            self._see(slot)

    def discard(self, worker: int) -> None:
        """Forget what was staged for the worker. Returns at once, as `forget`."""
        slot = self._staged.pop(worker, None)
        if slot is not None:
            self._retire(slot)

    def tidy(self, max_s: float) -> bool:
        """Work for about max_s seconds on what `forget` left. Returns True when all is done."""
        end = time.perf_counter() + max_s
        while self._dead:
            if self._sweep() and time.perf_counter() >= end:
                break
        return not self._dead

    def match(self, hashes: Hashes) -> dict[int, int]:
        """How many leading blocks each worker holds; workers that lack the first are left out."""
        return _pairs(self._out[: self._match(hashes)])

    def deepest(self, hashes: Hashes, most: int) -> tuple[dict[int, int], int]:
        """As `match`, but of more than `most` workers only those that hold most of the blocks.

        Of workers that hold the longest prefix and are more than that, each call gives others.
        Returns also how many of these are left out."""
        told = self._match(hashes)
        if told <= 2 * most:
            return _pairs(self._out[:told]), 0
        depths = self._out[1:told:2]  # the shortest first
        first = int(np.searchsorted(depths, depths[-1]))
        ties = len(depths) - first
        if ties <= most:
            return _pairs(self._out[told - 2 * most : told]), 0
        self._turn += 1
        places = first + (self._turn + np.arange(most) * ties // most) % ties
        return dict.fromkeys(self._out[2 * places].tolist(), int(depths[-1])), ties - most

    def blocks(self, worker: int) -> int:
        """How many blocks the worker holds."""
        slot = self._slots.get(worker)
        return 0 if slot is None else int(self._m.slots[2 * slot])

    def digest(self, worker: int) -> int:
        """The low 63 bits of the worker's hashes xored: equal sets have equal digests."""
        slot = self._slots.get(worker)
        return 0 if slot is None else int(self._m.slots[2 * slot + 1]) & (2**63 - 1)

    def refused(self, worker: int) -> int:
        """How many of the blocks that the worker holds or held were refused."""
        slot = self._slots.get(worker)
        return 0 if slot is None else self._refused.get(slot, 0)

    def hashes(self, worker: int) -> HashArray:
        """The worker's blocks, in any order. Walks the whole table at once."""
        slot = self._slots.get(worker)
        out = np.empty(self.blocks(worker), np.uint64)
        if slot is not None:
            table.collect(self._m, slot, 0, int(self._m.meta[table.USED]), out)
        return out

    def pages(self, worker: int, segments: int = 8) -> Iterator[HashArray]:
        """The worker's blocks in pages of at most `segments` * table.FULL.

        The index may change between two pages. A block that the worker holds from the first page to
        the last is in one of them. Others may be."""
        slot, first = self._slots.get(worker), 0
        out = np.empty(segments * SEGMENT, np.uint64)
        # A split moves entries to a new last segment, so what was not read is still to be read.
        while slot is not None and first < (used := int(self._m.meta[table.USED])):
            last = min(first + segments, used)
            yield out[: table.collect(self._m, slot, first, last, out)].copy()
            first = last

    @property
    def room(self) -> int:
        """How many more different blocks may be stored."""
        return int(self._m.meta[table.LIMIT]) - len(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the table and the pool that have ever been used."""
        meta = self._m.meta
        return int(16 * SEGMENT * (meta[table.USED] + 1) + 8 * meta[table.BUMP])

    def __len__(self) -> int:
        """How many different blocks are kept, those included that `tidy` has not reached."""
        return int(self._m.meta[table.BLOCKS])

    def _match(self, hashes: Hashes) -> int:
        """Write (worker, leading blocks) to `_out`. Returns the numbers written."""
        array = as_array(hashes)
        if not len(array):
            return 0
        return int(table.match(self._m, array, self._seen, self._names, self._out))

    def _change(self, slot: int, hashes: Hashes, op: int, ops: Ops = _NO_OPS) -> int:
        array = as_array(hashes)
        refused = int(table.change(self._m, array, ops, op, slot))
        if refused and self._dead:
            # The dead take up the room. To do all again changes nothing for those that were stored.
            self.tidy(0.001)
            refused = int(table.change(self._m, array, ops, op, slot))
        if refused:
            self._refused[slot] = self._refused.get(slot, 0) + refused
        return refused

    def _slot(self, worker: int) -> int:
        slot = self._slots.get(worker)
        if slot is None:
            slot = self._slots[worker] = self._take(worker)
            self._see(slot)
        return slot

    def _take(self, worker: int) -> int:
        """An empty slot, the lowest one: the lower the slots, the smaller the rows."""
        if not self._free and self._used == SLOTS:
            self.tidy(math.inf)
            if not self._free:
                raise ValueError(f"an index has room for {SLOTS} workers")
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot, self._used = self._used, self._used + 1
            words = (self._used + 63) // 64
            if 3 * words > len(self._seen):
                seen = np.zeros(3 * words, np.uint64)
                seen[: words - 1] = self._seen[: words - 1]
                self._seen = seen
        self._names[slot] = worker
        return slot

    def _see(self, slot: int) -> None:
        self._seen[slot >> 6] |= np.uint64(1 << (slot & 63))

    def _retire(self, slot: int) -> None:
        self._seen[slot >> 6] &= ~np.uint64(1 << (slot & 63))
        self._refused.pop(slot, None)
        self._dead.append(slot)

    def _sweep(self) -> bool:
        """Empty some segments of the first dead slot. Returns False if there was nothing to do."""
        slot, used = self._dead[0], int(self._m.meta[table.USED])
        busy = bool(self._m.slots[2 * slot])
        if busy:
            last = min(self._at + _SWEEP, used)
            found = table.collect(self._m, slot, self._at, last, self._page)
            self._change(slot, self._page[:found], 0)
            self._at = last
        if not self._m.slots[2 * slot]:
            heapq.heappush(self._free, self._dead.popleft())
            self._at = 0
        return busy


class Predicted:
    """Where prompts went whose blocks no worker has stored yet.

    Prompts that share a prefix often come in one burst. The first one's blocks are stored after its
    prefill. Until then the others find them here and follow it. An entry lives for `life_s` to
    twice that.

    max_blocks: most blocks kept; what comes beyond is not remembered until older ones have died."""

    def __init__(self, max_blocks: int, life_s: float) -> None:
        self._life = life_s
        self._young = PrefixIndex(max(1, max_blocks // 2))
        self._old = PrefixIndex(max(1, max_blocks // 2))
        self._turn: float | None = None

    def add(self, worker: int, hashes: Hashes, now: float) -> None:
        """A prompt with these blocks was sent to the worker. now: monotonic seconds."""
        self._age(now)
        self._young.store(worker, hashes)

    def match(self, hashes: Hashes, now: float) -> dict[int, int]:
        """As `PrefixIndex.match`, over the predicted blocks."""
        self._age(now)
        found = self._old.match(hashes)
        for worker, count in self._young.match(hashes).items():
            found[worker] = max(count, found.get(worker, 0))
        return found

    def forget(self, worker: int) -> None:
        """The worker is gone, or what was sent to it failed."""
        self._young.forget(worker)
        self._old.forget(worker)

    def __len__(self) -> int:
        """How many blocks are kept; one that is in both generations counts twice."""
        return len(self._young) + len(self._old)

    def _age(self, now: float) -> None:
        """Two generations take turns: no timer, and no list of entries."""
        if self._turn is None:
            self._turn = now
        if now - self._turn >= 2 * self._life:
            self._young.clear()
            self._old.clear()
            self._turn = now
        elif now - self._turn >= self._life:
            self._young, self._old = self._old, self._young
            self._young.clear()
            self._turn += self._life
