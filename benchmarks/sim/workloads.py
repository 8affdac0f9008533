"""What the simulator sends: generated conversations, or a trace, with the content of their blocks.

A request's blocks are named by 64-bit chain hashes: equal hashes mean equal tokens from the start
of the prompt up to there. The simulator hands them to the same index that the frontend uses. A
workload is a pure function of its arguments and the seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

BLOCK = 16
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
    """

    number: int
    at: float
    tokens: int
    output: int
    hashes: list[int]
    answer: list[int] = field(default_factory=list)
    session: int = 0
    follows: Req | None = None


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


def lognormal(rng: random.Random, median: float, sigma: float, most: float) -> int:
    """A length in tokens, at least 1."""
    return max(1, int(min(most, median * math.exp(rng.gauss(0.0, sigma)))))


def conversations(
    count: int,
    span_s: float,
    *,
    seed: int,
    turns: float = 5.0,
    prompts: int = 20,
    system: int = 512,
    first: int = 1024,
    turn: int = 256,
    output: int = 128,
    think_s: float = 20.0,
) -> Workload:
    """Conversations of several turns. Each turn waits for the answer, then for its user.

    count: conversations, which begin over `span_s` seconds.
    turns: mean number, geometric.
    prompts: different system prompts, of `system` tokens; the n-th is used 1/n as often as the 1st.
    first, turn, output: median length of the first message, of the others, and of an answer.
    think_s: mean time between answer and next turn, exponential.
    """
    rng = random.Random(mix(seed, 1))
    shares = [1.0 / (n + 1) for n in range(prompts)]
    requests: list[Req] = []
    for session, at in enumerate(sorted(rng.uniform(0.0, span_s) for _ in range(count))):
        text = Text(BLOCK, mix(seed, 2))
        if prompts:
            text.add(system, mix(seed, 3, rng.choices(range(prompts), shares)[0]))
        before, number = None, 0
        while number == 0 or rng.random() < 1.0 - 1.0 / turns:
            text.add(
                lognormal(rng, turn if number else first, 1.0, 32_768),
                mix(seed, 4, session, number),
            )
            answer = lognormal(rng, output, 0.8, 2048)
            prompt = list(text.hashes)
            length = text.tokens
            text.add(answer, mix(seed, 5, session, number))
            wait = rng.expovariate(1.0 / think_s) if number else at
            before = Req(
                len(requests),
                wait,
                length,
                answer,
                prompt,
                text.hashes[len(prompt) :],
                session,
                follows=before,
            )
            requests.append(before)
            number += 1
    return Workload("conversations", BLOCK, requests)


class Line(msgspec.Struct):
    """One request of a trace in the format of the Mooncake project (benchmarks/traces/README.md).

    timestamp: ms. hash_ids: a number for each block of the prompt. Equal numbers mean equal tokens
    from the start of the prompt up to there."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def trace(path: Path, *, block: int, grow: int) -> Workload:
    """Read a trace, one JSON object a line. Raises ValueError naming the line that is none.

    block: tokens of one block in the file. grow: factor for lengths and blocks."""
    lines = []
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            lines.append(msgspec.json.decode(text, type=Line))
        except msgspec.MsgspecError as exc:
            raise ValueError(f"{path}, line {number}: {exc}") from None
    lines.sort(key=lambda line: line.timestamp)
    requests: list[Req] = []
    for line, session in zip(lines, _sessions(lines), strict=True):
        tokens, output = max(1, line.input_length), max(1, line.output_length)
        hashes = [mix(name, 33) for name in line.hash_ids[: tokens // block]]
        at = (line.timestamp - lines[0].timestamp) / 1000.0
        requests.append(
            Req(len(requests), at, tokens * grow, output * grow, hashes, session=session)
        )
    return Workload(path.stem, block * grow, requests)


def _sessions(lines: Sequence[Line]) -> list[int]:
    """A session for each request. A request goes on with that of an earlier one, if it repeats at
    least half of its prompt."""
    owner: dict[int, int] = {}
    sessions: list[int] = []
    for number, line in enumerate(lines):
        ids = line.hash_ids
        known = next((i for i, name in enumerate(ids) if name not in owner), len(ids))
        session = number
        if known:
            before = owner[ids[known - 1]]
            if 2 * known >= len(lines[before].hash_ids):
                session = sessions[before]
        sessions.append(session)
        for name in ids[known:]:
            owner[name] = number
    return sessions
