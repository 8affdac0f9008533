"""Which workers hold which blocks: a dict from the hash of a block to a set of workers.

A set is an int, in which each worker has a bit, so a lookup takes one step for each block, however
many workers there are. docs/decisions.md (50) says how long it takes.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Held:
    """What one worker holds. digest: the hashes xored. refused: blocks for which was no room.

    Only the index changes it."""

    bit: int = 0
    blocks: set[int] = field(default_factory=set)
    digest: int = 0
    refused: int = 0


class PrefixIndex:
    """A bounded set of (worker, block hash). The owner names the workers.

    max_blocks: how many different blocks are kept at most. Blocks beyond that are refused, which
    `held` tells: removals make room again. A block takes about 150 bytes, and 40 more for each
    further worker that holds it."""

    def __init__(self, max_blocks: int) -> None:
        self._max = max_blocks
        self._turn = 0
        self._holders: dict[int, int] = {}
        self._workers: dict[Hashable, Held] = {}
        self._names: dict[int, Any] = {}  # workers by their bits

    def store(self, worker: Hashable, hashes: Sequence[int]) -> None:
        """The worker holds these blocks now."""
        self.apply(worker, b"\1" * len(hashes), hashes)

    def apply(self, worker: Hashable, ops: bytes, hashes: Sequence[int]) -> None:
        """Store (ops[i] = 1) or remove (0) hashes[i], in order.

        Unknown blocks that are to be removed are ignored."""
        if (held := self._workers.get(worker)) is None:
            held = self._workers[worker] = Held(self._free_bit())
            self._names[held.bit] = worker
        bit, blocks, holders = held.bit, held.blocks, self._holders
        for op, one in zip(ops, hashes, strict=True):
            if bool(op) is (one in blocks):
                continue
            found = holders.get(one, 0)
            if op:
                if not found and len(holders) >= self._max:
                    held.refused += 1
                    continue
                blocks.add(one)
                holders[one] = found | bit if found else bit  # most blocks share this int
            else:
                blocks.remove(one)
                if found == bit:
                    del holders[one]
                else:
                    holders[one] = found ^ bit
            held.digest ^= one

    def forget(self, worker: Hashable) -> None:
        """The worker holds nothing any more. Takes about 30 ms for 60,000 blocks."""
        if (held := self._workers.get(worker)) is not None:
            self.apply(worker, bytes(len(held.blocks)), [*held.blocks])
            del self._workers[worker], self._names[held.bit]

    def match(self, hashes: Sequence[int]) -> dict[Any, int]:
        """How many leading blocks each worker holds; workers that lack the first are left out."""
        return self.deepest(hashes, sys.maxsize)[0]

    def deepest(self, hashes: Sequence[int], most: int) -> tuple[dict[Any, int], int]:
        """As `match`, but of more than `most` workers only those that hold most of the blocks.

        Of workers that hold the longest prefix and are more than that, each call gives others.
        Returns also how many of these are left out."""
        left = self._holders.get(hashes[0], 0) if hashes else 0
        runs: list[tuple[int, int]] = []
        for count, one in enumerate(hashes):
            if lost := left & ~self._holders.get(one, 0):
                runs.append((lost, count))
                left ^= lost
            if not left:
                break
        runs.append((left, len(hashes)))
        found: dict[Any, int] = {}
        for bits, count in reversed(runs):
            if not found and (ties := bits.bit_count()) > most:
                later = bits >> self._turn << self._turn
                in_turn = itertools.chain(_each(later), _each(bits ^ later))
                named = list(itertools.islice(in_turn, most))
                self._turn = named[-1].bit_length()
                return {self._names[bit]: count for bit in named}, ties - most
            for bit in itertools.islice(_each(bits), most - len(found)):
                found[self._names[bit]] = count
        return found, 0

    def held(self, worker: Hashable) -> Held:
        """What the worker holds now."""
        return self._workers.get(worker) or Held()

    def __len__(self) -> int:
        """How many different blocks are kept."""
        return len(self._holders)

    def _free_bit(self) -> int:
        """The lowest one: the lower the bits, the smaller the ints."""
        used = sum(self._names)
        return ~used & (used + 1)


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
        self._half = max_blocks // 2
        self._young, self._old = PrefixIndex(self._half), PrefixIndex(self._half)
        self._turn: float | None = None

    def add(self, worker: Hashable, hashes: Sequence[int], now: float) -> None:
        """A prompt with these blocks was sent to the worker. now: monotonic seconds."""
        self._age(now)
        self._young.store(worker, hashes)

    def match(self, hashes: Sequence[int], now: float) -> dict[Any, int]:
        """As `PrefixIndex.match`, over the predicted blocks."""
        self._age(now)
        found = self._old.match(hashes)
        for worker, count in self._young.match(hashes).items():
            found[worker] = max(count, found.get(worker, 0))
        return found

    def forget(self, worker: Hashable) -> None:
        """The worker is gone, or what was sent to it failed."""
        self._young.forget(worker)
        self._old.forget(worker)

    def _age(self, now: float) -> None:
        """Two generations take turns: no timer, and no list of entries."""
        if self._turn is None or now - self._turn >= 2 * self._life:
            self._young, self._old = PrefixIndex(self._half), PrefixIndex(self._half)
            self._turn = now
        elif now - self._turn >= self._life:
            self._young, self._old = PrefixIndex(self._half), self._young
            self._turn += self._life
