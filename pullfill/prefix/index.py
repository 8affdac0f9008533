"""Which workers hold which blocks: a dict from the hash of a block to a set of workers.

A set is an int, in which each worker has a bit. A worker that is forgotten leaves its bit behind.
No lookup sees it any more, and `tidy` removes it later. docs/decisions.md says what a lookup takes.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# The dict is cut into so many small ones, by the hash. So no call takes long: neither one in which
# a dict grows, nor a step of `tidy`.
_PARTS = 1024


@dataclass(slots=True, eq=False)
class _Slot:
    """One worker's bit. digest: the hashes xored. refused: blocks for which there was no room."""

    bit: int
    blocks: int = 0
    digest: int = 0
    refused: int = 0


class PrefixIndex:
    """A bounded set of (worker, block hash). A worker is a number that the owner gives.

    max_blocks: how many different blocks are kept at most. Blocks beyond that are refused, which
    `store` and `refused` tell: removals make room again. A block takes about 90 bytes, and one at
    several workers up to 50 more, and 4 for each 30 workers."""

    def __init__(self, max_blocks: int) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be at least 1, not {max_blocks}")
        self._max = max_blocks
        self._turn = 0
        self.clear()

    def clear(self) -> None:
        """Forget all workers, now."""
        self._parts: list[dict[int, int]] = [{} for _ in range(_PARTS)]
        self._blocks = 0
        self._slots: dict[int, _Slot] = {}
        self._staged: dict[int, _Slot] = {}
        self._dead: deque[tuple[_Slot, Iterator[dict[int, int]]]] = deque()
        self._seen = 0  # the bits that lookups see
        self._used = 0  # the bits that were given out
        self._names: dict[int, int] = {}

    def store(self, worker: int, hashes: Sequence[int]) -> int:
        """The worker holds these blocks now. Returns how many were refused, for want of room."""
        return self.apply(worker, b"\1" * len(hashes), hashes)

    def apply(self, worker: int, ops: bytes, hashes: Sequence[int]) -> int:
        """Store (ops[i] = 1) or remove (0) hashes[i], in order. Returns how many were refused.

        Unknown blocks that are to be removed are ignored."""
        if (slot := self._slots.get(worker)) is None:
            slot = self._slots[worker] = self._take(worker)
            self._seen |= slot.bit
        return self._change(slot, ops, hashes)

    def forget(self, worker: int) -> None:
        """The worker holds nothing any more. Returns at once; `tidy` gives the memory back."""
        if (slot := self._slots.pop(worker, None)) is not None:
            self._seen ^= slot.bit
            self._retire(slot)

    def stage(self, worker: int, hashes: Sequence[int]) -> int:
        """Like `store`, for a snapshot that is not complete: `match` does not see it yet."""
        if (slot := self._staged.get(worker)) is None:
            slot = self._staged[worker] = self._take(worker)
        return self._change(slot, b"\1" * len(hashes), hashes)

    def adopt(self, worker: int) -> None:
        """The worker holds exactly what was staged for it. Returns at once, as `forget`."""
        self.forget(worker)
        if (slot := self._staged.pop(worker, None)) is not None:
            self._slots[worker] = slot
            self._seen |= slot.bit

    def discard(self, worker: int) -> None:
        """Forget what was staged for the worker. Returns at once, as `forget`."""
        if (slot := self._staged.pop(worker, None)) is not None:
            self._retire(slot)

    def tidy(self, max_s: float) -> bool:
        """Work for about max_s seconds on what `forget` left. Returns True when all is done."""
        end = time.perf_counter() + max_s
        while self._dead:
            slot, parts = self._dead[0]
            for part in parts if slot.blocks else ():
                held = [one for one, found in part.items() if found & slot.bit]
                self._change(slot, bytes(len(held)), held)
                if time.perf_counter() >= end:
                    return False
            self._dead.popleft()
            self._used ^= slot.bit
        return True

    def match(self, hashes: Sequence[int]) -> dict[int, int]:
        """How many leading blocks each worker holds; workers that lack the first are left out."""
        return self.deepest(hashes, sys.maxsize)[0]

    def deepest(self, hashes: Sequence[int], most: int) -> tuple[dict[int, int], int]:
        """As `match`, but of more than `most` workers only those that hold most of the blocks.

        Of workers that hold the longest prefix and are more than that, each call gives others.
        Returns also how many of these are left out."""
        left, runs = self._seen, list[tuple[int, int]]()
        for count, one in enumerate(hashes):
            lost = left & ~self._parts[one % _PARTS].get(one, 0)
            if lost:
                runs.append((lost, count))
                left ^= lost
                if not left:
                    break
        runs.append((left, len(hashes)))
        found: dict[int, int] = {}
        for bits, count in reversed(runs):
            if not bits or not count:
                continue
            if not found and (ties := bits.bit_count()) > most:
                later = bits >> self._turn << self._turn
                in_turn = itertools.chain(_each(later), _each(bits ^ later))
                named = list(itertools.islice(in_turn, most))
                self._turn = named[-1].bit_length()
                return {self._names[bit.bit_length()]: count for bit in named}, ties - most
            for bit in itertools.islice(_each(bits), most - len(found)):
                found[self._names[bit.bit_length()]] = count
        return found, 0

    def blocks(self, worker: int) -> int:
        """How many blocks the worker holds."""
        slot = self._slots.get(worker)
        return 0 if slot is None else slot.blocks

    def digest(self, worker: int) -> int:
        """The low 63 bits of the worker's hashes xored: equal sets have equal digests."""
        slot = self._slots.get(worker)
        return 0 if slot is None else slot.digest & (2**63 - 1)

    def refused(self, worker: int) -> int:
        """How many of the blocks that the worker holds or held were refused."""
        slot = self._slots.get(worker)
        return 0 if slot is None else slot.refused

    @property
    def room(self) -> int:
        """How many more different blocks may be stored."""
        return self._max - self._blocks

    def __len__(self) -> int:
        """How many different blocks are kept, those included that `tidy` has not reached."""
        return self._blocks

    def _change(self, slot: _Slot, ops: bytes, hashes: Sequence[int]) -> int:
        bit, refused = slot.bit, 0
        for op, one in zip(ops, hashes, strict=True):
            part = self._parts[one % _PARTS]
            found = part.get(one, 0)
            if op:
                if found & bit:
                    continue
                if not found:
                    if self._blocks >= self._max and not self._make_room():
                        refused += 1
                        continue
                    self._blocks += 1
                part[one] = found | bit if found else bit  # most blocks share this int
                slot.blocks += 1
            elif found & bit:
                if found == bit:
                    del part[one]
                    self._blocks -= 1
                else:
                    part[one] = found ^ bit
                slot.blocks -= 1
            else:
                continue
            slot.digest ^= one
        slot.refused += refused
        return refused

    def _make_room(self) -> bool:
        while self._blocks >= self._max and not self.tidy(0.001):
            pass
        return self._blocks < self._max

    def _take(self, worker: int) -> _Slot:
        """A new slot with the lowest free bit: the lower the bits, the smaller the ints."""
        bit = ~self._used & (self._used + 1)
        self._used |= bit
        self._names[bit.bit_length()] = worker
        return _Slot(bit)

    def _retire(self, slot: _Slot) -> None:
        self._dead.append((slot, iter(self._parts)))


def _each(bits: int) -> Iterator[int]:
    """The bits, from the lowest on."""
    while bits:
        low = bits & -bits
        yield low
        bits ^= low


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

    def add(self, worker: int, hashes: Sequence[int], now: float) -> None:
        """A prompt with these blocks was sent to the worker. now: monotonic seconds."""
        self._age(now)
        self._young.store(worker, hashes)

    def match(self, hashes: Sequence[int], now: float) -> dict[int, int]:
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
        if self._turn is None or now - self._turn >= 2 * self._life:
            self._young.clear()
            self._old.clear()
            self._turn = now
        elif now - self._turn >= self._life:
            self._young, self._old = self._old, self._young
            self._young.clear()
            self._turn += self._life
