"""Where prompts went whose blocks no worker has stored yet.

Prompts that share a prefix often come in one burst. The first one's blocks are stored after its
prefill; until then the others find them here and follow it.
"""

from __future__ import annotations

from pullfill.prefix.chain import Hashes
from pullfill.prefix.index import PrefixIndex


class Predicted:
    """Blocks that workers will hold soon. An entry lives for `life_s` to twice that.

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
