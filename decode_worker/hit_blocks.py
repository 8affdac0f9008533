"""Which blocks of a prefix hit a prefill worker may read, and who keeps them until then.

A prefill worker computes from the end of the hit on. Through a sliding window its first tokens see
the last blocks of the hit. vLLM has not kept all of these for the request, whose own window begins
later, at the end of the prompt. But they may still be cached. Then a job holds them until it ends.

    window of 2 blocks    position     0  1  2  3  4  5
                          the hit      x  x  x
                          vLLM keeps               x  x
                          held            x  x

Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pullfill.engine.groups import BlockOrder, cached_block


class HitBlocks:
    """See the module.

    kept_from: as `engine.groups.kept_from` returns it.
    pool: vLLM's BlockPool.
    _held: blocks that a job may read and its request does not hold, by request."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.kept_from: Callable[[int], tuple[int, ...]] = lambda _tokens: (0,)
        self.pool: Any = None
        self._held: dict[str, list[Any]] = {}

    def hold(
        self, request: Any, tables: Sequence[Sequence[int]], hit_tokens: int, kept: Sequence[int]
    ) -> tuple[tuple[int, ...], list[int]]:
        """Return from which positions on the hit may be read, and its blocks from there on.

        tables: the block ids of the request, for each KV cache group.
        kept: for each group, the first position that vLLM has kept for the request."""
        hit = hit_tokens // self._block_size
        own, read_from = tuple(map(list, tables)), []
        for group, needed in enumerate(self.kept_from(hit_tokens)):
            first = min(kept[group], hit)
            found = self._cached_before(first, request, group, needed)
            if first - len(found) > needed:
                found = []  # a prefill worker that lacks a part of its window reads nothing
            for block in found:
                first -= 1
                own[group][first] = block.block_id
            if found:
                self.pool.touch(found)
                self._held.setdefault(request.request_id, []).extend(found)
            read_from.append(first)
        return tuple(read_from), BlockOrder(tuple(read_from)).ids(own, 0, hit)

    def give_back(self, request_id: str) -> None:
        """Hold no blocks for the request any more: its job has ended."""
        if held := self._held.pop(request_id, None):
            self.pool.free_blocks(held)

    def _cached_before(self, position: int, request: Any, group: int, needed: int) -> list[Any]:
        """Return the cached blocks before a position, the last one first.

        needed: the first position that a prefill worker needs."""
        found: list[Any] = []
        for at in range(position - 1, needed - 1, -1):
            block = cached_block(self.pool, self._block_size, request, at, group)
            if block is None:
                break
            found.append(block)
        return found
