"""What the simulator sends: requests with the content of their blocks, as hashes.

A request's blocks are named by 64-bit chain hashes: equal hashes mean equal tokens from the start
of the prompt up to there. The simulator hands them to the same index that the frontend uses.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pullfill.prefix.chain import HashArray

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """Return a 64-bit hash of whole numbers (splitmix64 over a running state)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        z = (state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
        state = z ^ (z >> 31)
    return state


@dataclass(slots=True, eq=False)
class Req:
    """One request.

    number: place in the workload, from 0.
    at: arrival, in seconds. With `follows`: seconds after the end of that request.
    tokens, output: length of the prompt and of the answer, in tokens.
    hashes: of the whole blocks of the prompt.
    answer: of the blocks that the answer completes. They follow `hashes`.
    session: requests of one conversation share it.
    group: siblings that share a prefix have one. -1: none.
    """

    number: int
    at: float
    tokens: int
    output: int
    hashes: list[int]
    answer: list[int] = field(default_factory=list)
    session: int = 0
    group: int = -1
    follows: Req | None = None
    _packed: HashArray | None = None

    def packed(self) -> HashArray:
        """The hashes as the index takes them."""
        if self._packed is None:
            self._packed = np.array(self.hashes, np.uint64)
        return self._packed


@dataclass(slots=True, eq=False)
class Workload:
    """Requests, and the size of their blocks in tokens."""

    name: str
    block: int
    requests: list[Req]

    def blocks(self) -> int:
        """Return an upper bound of the number of different blocks.

        A turn repeats the blocks of the turn before, so each of those counts once."""
        count = 0
        for req in self.requests:
            count += len(req.hashes) + len(req.answer)
            if req.follows is not None:
                count -= len(req.follows.hashes) + len(req.follows.answer)
        return count


class Text:
    """The blocks of a growing text: chain hashes of `block` tokens each.

    Texts to which the same was added first, share the blocks of that."""

    __slots__ = ("_block", "_head", "_whole", "hashes", "tokens")

    def __init__(self, block: int, name: int = 0) -> None:
        self._block = block
        self._head = mix(name)
        self._whole = 0
        self.tokens = 0
        self.hashes: list[int] = []

    def add(self, tokens: int, name: int) -> None:
        """Append `tokens` tokens. name: what they say; equal names make equal blocks."""
        self.tokens += tokens
        whole = self.tokens // self._block
        while self._whole < whole:
            self._head = mix(self._head, name, self._whole)
            self.hashes.append(self._head)
            self._whole += 1
        # The rest of a block decides over its hash too, although it is not whole yet.
        self._head = mix(self._head, name)
