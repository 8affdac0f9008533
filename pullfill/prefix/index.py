"""Which workers hold which blocks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from pullfill.prefix.chain import HashArray, Hashes, as_array
from pullfill.wire.prefix import Op

PAGE = 8192


class PrefixIndex:
    """A bounded set of (worker, block hash). A worker is a small number that the owner gives.

    max_blocks: how many different blocks are kept at most. Blocks beyond that are refused, which
    `store` and `refused` tell: removals make room again."""

    def __init__(self, max_blocks: int) -> None:
        self._max = max_blocks
        self._held: dict[int, set[int]] = {}
        self._staged: dict[int, set[int]] = {}
        self._refused: dict[int, int] = {}

    def store(self, worker: int, hashes: Hashes) -> int:
        """The worker holds these blocks now. Returns how many were refused, for want of room."""
        return self._store(self._held, worker, hashes)

    def _store(self, into: dict[int, set[int]], worker: int, hashes: Hashes) -> int:
        before = self._refused.get(worker, 0)
        held = into.setdefault(worker, set())
        for one in as_array(hashes).tolist():
            if len(self) < self._max or self._known(one):
                held.add(one)
            else:
                self._refused[worker] = self._refused.get(worker, 0) + 1
        return self._refused.get(worker, 0) - before

    def remove(self, worker: int, hashes: Hashes) -> None:
        """The worker holds these blocks no more. Unknown ones are ignored."""
        self._held.get(worker, set()).difference_update(as_array(hashes).tolist())

    def apply(self, worker: int, ops: bytes, hashes: Hashes) -> int:
        """Store and remove in order: ops[i] says what happens with hashes[i]. Returns how many
        blocks were refused. Raises ValueError if there are not as many ops as hashes."""
        array, refused = as_array(hashes), 0
        if len(array) != len(ops):
            raise ValueError(f"{len(ops)} ops for {len(array)} hashes")
        for op, one in zip(ops, array, strict=True):
            if op == Op.STORE:
                refused += self.store(worker, one.tobytes())
            elif op == Op.REMOVE:
                self.remove(worker, one.tobytes())
            else:
                self.forget(worker)
        return refused

    def forget(self, worker: int) -> None:
        """The worker holds nothing any more. Returns at once; `tidy` gives the memory back."""
        self._held.pop(worker, None)
        self._refused.pop(worker, None)

    def stage(self, worker: int, hashes: Hashes) -> int:
        """Like `store`, for a snapshot that is not complete: `match` does not see it yet."""
        return self._store(self._staged, worker, hashes)

    def adopt(self, worker: int) -> None:
        """The worker holds exactly what was staged for it. Returns at once, as `forget`."""
        refused = self._refused.get(worker, 0)
        self.forget(worker)
        self._held[worker] = self._staged.pop(worker, set())
        self._refused[worker] = refused

    def discard(self, worker: int) -> None:
        """Forget what was staged for the worker. Returns at once, as `forget`."""
        self._staged.pop(worker, None)

    def tidy(self, max_s: float) -> bool:
        """Work for about max_s seconds on what `forget` left. Returns True when all is done."""
        return True

    def match(self, hashes: Hashes) -> dict[int, int]:
        """How many leading blocks each worker holds; workers that lack the first are left out."""
        wanted, found = as_array(hashes).tolist(), {}
        for worker, held in self._held.items():
            count = next((i for i, one in enumerate(wanted) if one not in held), len(wanted))
            if count:
                found[worker] = count
        return found

    def blocks(self, worker: int) -> int:
        """How many blocks the worker holds."""
        return len(self._held.get(worker, ()))

    def digest(self, worker: int) -> int:
        """The low 63 bits of the worker's hashes xored: equal sets have equal digests."""
        return int(np.bitwise_xor.reduce(self.hashes(worker), initial=np.uint64(0))) & (2**63 - 1)

    def refused(self, worker: int) -> int:
        """How many of the worker's blocks were refused since it was forgotten or adopted."""
        return self._refused.get(worker, 0)

    def hashes(self, worker: int) -> HashArray:
        """The worker's blocks, in any order. Walks the whole index."""
        return np.fromiter(self._held.get(worker, ()), np.uint64)

    def pages(self, worker: int) -> Iterator[HashArray]:
        """The worker's blocks in pages. Between two pages the index may change: a block that was
        there from the first page to the last is in one of them."""
        rest = iter(list(self._held.get(worker, ())))
        while page := list(islice(rest, PAGE)):
            yield np.array(page, np.uint64)

    def _known(self, one: int) -> bool:
        return any(one in held for held in (*self._held.values(), *self._staged.values()))

    def __len__(self) -> int:
        """How many different blocks are kept."""
        return len(set().union(*self._held.values(), *self._staged.values()))
