"""vLLM's block tables for one prompt, with windows, and a memory that knows which token lies where.

All prompts are the beginnings of one text. So the KV of a token is its label, (group, token). What
an engine computes is checked: everything that a window sees must be there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from tests.support.fakes import FakeBlock, FakeTransferWorker

Label = tuple[int, int] | None
Windows = tuple[int | None, ...]
"""For each KV cache group, how many tokens a layer sees. None: all."""
NULL = 0


class WindowEngine:
    """vLLM's scheduler, KVCacheManager and BlockPool, as far as one request goes.

    size: tokens of a block.
    memory: the tokens of each block.
    tables: the block ids of the request, for each group.
    cached: the block of each hash and group."""

    def __init__(self, size: int, windows: Windows, num_blocks: int = 250) -> None:
        self.size = self.hash_block_size = size
        self.windows = windows
        self.blocks = [FakeBlock(at) for at in range(num_blocks)]
        self.free = deque(range(1, num_blocks))
        self.memory: list[list[Label]] = [[None] * size for _ in range(num_blocks)]
        self.tables: list[list[int]] = [[] for _ in windows]
        self.cached: dict[tuple[str, int], int] = {}
        self.block_pool = self

    # ------------------------------------------------------------------ BlockPool

    def touch(self, blocks: Iterable[FakeBlock]) -> None:
        for block in blocks:
            assert block.block_id != NULL
            if block.ref_cnt == 0:
                self.free.remove(block.block_id)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[FakeBlock]) -> None:
        for block in blocks:
            assert block.ref_cnt > 0, "freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free.append(block.block_id)

    def get_cached_block(self, block_hash: str, groups: Sequence[int]) -> list[FakeBlock] | None:
        (group,) = groups
        found = self.cached.get((block_hash, group))
        return None if found is None else [self.blocks[found]]

    def scribble(self, count: int) -> None:
        """Have other requests take the oldest free blocks, fill them with other KV, and end."""
        taken = [self._take() for _ in range(min(count, len(self.free)))]
        for at in taken:
            self.memory[at] = [(-1, -1)] * self.size
        self.free_blocks([self.blocks[at] for at in taken])

    def lose(self, which: Iterable[int]) -> None:
        """Have other requests take some of the free cached blocks. which: their numbers."""
        free = [block for _, block in sorted(self.cached.items()) if block in self.free]
        lost = {free[number] for number in which if number < len(free)}
        self.free = deque([*lost, *(block for block in self.free if block not in lost)])
        self.scribble(len(lost))

    def _take(self) -> int:
        at = self.free.popleft()
        self.cached = {key: block for key, block in self.cached.items() if block != at}
        self.blocks[at].ref_cnt = 1
        return at

    # ------------------------------------------------------------------ KVCacheManager

    def kept(self, tokens: int) -> tuple[int, ...]:
        """As `engine.groups.kept_from` says."""
        skipped = (0 if w is None else max(0, tokens - w + 1) for w in self.windows)
        return tuple(count // self.size for count in skipped)

    def get_block_ids(self, _request_id: str) -> tuple[list[int], ...]:
        return tuple(map(list, self.tables))

    def hashes(self, tokens: int) -> list[str]:
        return [str(at) for at in range(tokens // self.size)]

    def hit(self, tokens: int) -> int:
        """Length of the longest prefix hit of at most so many tokens."""
        for blocks in range(tokens // self.size, 0, -1):
            kept = self.kept(blocks * self.size)
            if all(
                (str(at), group) in self.cached
                for group, first in enumerate(kept)
                for at in range(first, blocks)
            ):
                return blocks * self.size
        return 0

    # ------------------------------------------------------------------ Scheduler

    def start(self, hit: int, external: int) -> None:
        """Give the request its hit, and blocks for what the connector brings."""
        gone = self.kept(hit + external)
        for group, table in enumerate(self.tables):
            for at in range(hit // self.size):
                block = NULL if at < gone[group] else self.cached[str(at), group]
                table.append(block)
                self.touch([self.blocks[block]] if block != NULL else [])
        if external:
            self._extend(hit + external, gone)

    def step(self, computed: int, count: int) -> None:
        """Allocate blocks for the next tokens, free those behind the windows, and cache."""
        gone = self.kept(computed)
        for group, table in enumerate(self.tables):
            for at in range(min(gone[group], len(table))):
                if table[at] != NULL:
                    self.free_blocks([self.blocks[table[at]]])
                    table[at] = NULL
        self._extend(computed + count, gone)
        self.cache(computed + count)

    def _extend(self, tokens: int, gone: Sequence[int]) -> None:
        for group, table in enumerate(self.tables):
            for at in range(len(table), -(-tokens // self.size)):
                table.append(NULL if at < gone[group] else self._take())

    def cache(self, tokens: int) -> None:
        """Put the full blocks into the prefix cache."""
        for group, table in enumerate(self.tables):
            for at, block in enumerate(table[: tokens // self.size]):
                if block != NULL:
                    self.cached.setdefault((str(at), group), block)

    def compute(self, computed: int, count: int) -> None:
        """Compute the next tokens. Each sees its window."""
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, computed - window + 1)
            for token in range(first, computed):
                assert self._at(group, token) == (group, token), "what a window sees"
        self.fill(computed, count)

    def fill(self, first: int, count: int) -> None:
        """Put the KV of these tokens into the blocks that are there."""
        for group, table in enumerate(self.tables):
            for token in range(first, first + count):
                at, inside = divmod(token, self.size)
                if table[at] != NULL:
                    self.memory[table[at]][inside] = (group, token)

    def _at(self, group: int, token: int) -> Label:
        return self.memory[self.tables[group][token // self.size]][token % self.size]

    def end(self) -> None:
        """Free the blocks of the request, the tail first."""
        for table in self.tables:
            self.free_blocks([self.blocks[at] for at in reversed(table) if at != NULL])
            table.clear()

    def serve(self, tokens: int, chunk: int) -> None:
        """Compute a whole prompt, and keep it in the prefix cache."""
        computed = self.hit(tokens - 1)
        self.start(computed, 0)
        while computed < tokens:
            count = min(chunk, tokens - computed)
            self.step(computed, count)
            self.compute(computed, count)
            computed += count
        self.end()

    def check_cache(self) -> None:
        """A cached block holds all of its tokens, and nothing is referred to by nobody."""
        for (at, group), block in self.cached.items():
            first = int(at) * self.size
            tokens = [(group, token) for token in range(first, first + self.size)]
            assert self.memory[block] == tokens, "a cached block"

    def check_free(self) -> None:
        """No block is held any more."""
        assert sorted(self.free) == list(range(1, len(self.blocks)))


class Copier(FakeTransferWorker):
    """Copies the labels of blocks, when `finish` is called."""

    def __init__(self, ours: WindowEngine, theirs: WindowEngine) -> None:
        super().__init__()
        self._ours, self._theirs = ours, theirs

    def finish(self, failure: BaseException | None = None) -> Any:
        copy = self.queue[0]
        for here, there in zip(copy.local, copy.remote, strict=True):
            assert NULL not in (here, there), "vLLM's null block holds no KV"
            ours, theirs = self._ours.memory[here], self._theirs.memory[there]
            source, target = (theirs, ours) if copy.read else (ours, theirs)
            target[:] = source
        return super().finish(failure)
