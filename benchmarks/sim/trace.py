"""Reads traces in the format of the Mooncake project (benchmarks/traces/README.md).

One JSON object a line: `timestamp` (ms), `input_length`, `output_length` (tokens), and `hash_ids`,
a number for each block of the prompt. Equal numbers mean equal tokens from the start of the prompt
up to there. Without `hash_ids` no two prompts share anything.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import reduce
from math import gcd
from pathlib import Path

import msgspec

from benchmarks.sim.requests import Req, Workload, mix

BLOCK = 512
"""Tokens per block, where a trace does not tell."""
BIN_MS = 1000
"""Timestamps that are all multiples of this or more are bins. Their requests are spread."""


class Line(msgspec.Struct):
    """One request of a trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] | None = None


def load(
    path: Path, *, block: int = 0, grow: int = 1, sample: float = 1.0, seed: int = 1
) -> Workload:
    """Read a trace. Raises ValueError naming the line that cannot be read.

    block: tokens of one block in the file. 0: find out.
    grow: factor for lengths and blocks.
    sample: share of the sessions that is kept. A session is kept as a whole, or not at all.
    """
    lines = sorted(_read(path), key=lambda line: line.timestamp)
    block = block or block_of(lines)
    times = _times(lines, random.Random(mix(seed, 30)))
    sessions = _sessions(lines)
    chance = random.Random(mix(seed, 31))
    kept = {name for name in sorted(set(sessions)) if chance.random() < sample}
    requests: list[Req] = []
    for number, (line, at, session) in enumerate(zip(lines, times, sessions, strict=True)):
        if session not in kept:
            continue
        tokens = max(1, line.input_length)
        whole = range(tokens // block)
        ids = line.hash_ids
        if ids is None:
            hashes = [mix(number, place, 32) for place in whole]
        else:
            hashes = [mix(name, 33) for name in ids[: len(whole)]]
        output = max(1, line.output_length) * grow
        requests.append(Req(len(requests), at, tokens * grow, output, hashes, session=session))
    return Workload(path.stem, block * grow, requests)


def _read(path: Path) -> list[Line]:
    lines = []
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            lines.append(msgspec.json.decode(text, type=Line))
        except msgspec.MsgspecError as exc:
            raise ValueError(f"{path}, line {number}: {exc}") from None
    if not lines:
        raise ValueError(f"{path} has no requests")
    return lines


def block_of(lines: Sequence[Line]) -> int:
    """The tokens per block that explain how many blocks each prompt has. BLOCK if none does."""
    told = [line for line in lines if line.hash_ids]
    for size in (16, 32, 64, 128, 256, 512, 1024):
        if told and all(len(x.hash_ids or ()) == -(-x.input_length // size) for x in told):
            return size
    return BLOCK


def _times(lines: Sequence[Line], rng: random.Random) -> list[float]:
    """Arrivals in seconds from the first. Requests of one bin are spread over it, in order."""
    first = lines[0].timestamp
    width = reduce(gcd, (int(line.timestamp - first) for line in lines))
    times = [(line.timestamp - first) / 1000.0 for line in lines]
    if width >= BIN_MS:
        times = sorted(at + rng.random() * width / 1000.0 for at in times)
    return times


def _sessions(lines: Sequence[Line]) -> list[int]:
    """A session for each request. A request goes on with that of an earlier one, if it repeats at
    least half of its prompt."""
    owner: dict[int, int] = {}
    sessions: list[int] = []
    for number, line in enumerate(lines):
        ids = line.hash_ids or []
        known = next((i for i, name in enumerate(ids) if name not in owner), len(ids))
        session = number
        if known:
            before = owner[ids[known - 1]]
            if 2 * known >= len(lines[before].hash_ids or ()):
                session = sessions[before]
        sessions.append(session)
        for name in ids[known:]:
            owner[name] = number
    return sessions
