"""What is asked, made from a seed before anything runs: the same for every system, never twice.

Every prompt is random token ids, so no two share a first block and nothing hits a prefix cache
unless it is meant to (`chat`, `trace`). Seeds name the workload, the repeat and the window: two
windows of one start never ask the same.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.serving.contract import Ask, Kind

SHORT_IN, SHORT_OUT, LANES = 32, 64, 4
LONG_IN, LONG_OUT, LONG_EVERY_S = 3000, 4, 2.0
FASTEST = 200.0
"""Tokens per second that no single stream exceeds: how many asks a closed loop gets."""
FIRST_LONG_S = 1.0
STAGGER_S = 0.25
SWEEP_IN, SWEEP_SHARE = 2048, 0.25
Shape = tuple[int, int]
"""Tokens of a prompt and of its answer."""
MIXED: Mapping[Shape, float] = {
    (SHORT_IN, SHORT_OUT): 1 - SWEEP_SHARE, (SWEEP_IN, LONG_OUT): SWEEP_SHARE
}  # fmt: skip
"""What `make bench-rates` asks, with the share of each."""
CHAT_FIRST = 3000
"""A cache holds whole blocks, of 128 tokens here: of shorter conversations that alone loses 5 %."""
SYSTEM, SYSTEMS = 2048, 6
"""Tokens of a system prompt, and how many of them there are."""
TRACE_BLOCK, TRACE_MOST = 16, 8000
"""Tokens of one block of a trace, and of the longest prompt together with its answer."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One window. seconds: nothing is sent later; None: it ends when everything was answered."""

    asks: tuple[Ask, ...]
    seconds: float | None = None


class Prompts:
    """Random prompts of a model's vocabulary; the same seed gives the same ones in order."""

    def __init__(self, vocabulary: range, *seed: object) -> None:
        self.random = random.Random("/".join(map(str, seed)))
        self._vocabulary = vocabulary

    def __call__(self, tokens: int) -> tuple[int, ...]:
        return tuple(self.random.choices(self._vocabulary, k=tokens))


@dataclass(frozen=True, slots=True)
class Longs:
    """The prompts that interfere: so many tokens, one every so many seconds."""

    tokens: int = LONG_IN
    every_s: float = LONG_EVERY_S

    def __str__(self) -> str:
        return f"{self.tokens} tokens every {self.every_s:g} s"


def interference(
    prompts: Prompts, seconds: float, longs: Longs | None, lanes: int = LANES
) -> Workload:
    """`lanes` streams, each asking again when it has its answer, and long prompts that wait for
    nobody. Without `longs` it is the control; without lanes, the longs alone."""
    asks = list(_streams(prompts, lanes, seconds))
    if longs:
        # The last one has time to be answered while the streams still run.
        count = max(1, int((seconds - FIRST_LONG_S) / longs.every_s))
        for number in range(count):
            at_s = FIRST_LONG_S + longs.every_s * number
            asks.append(Ask(Kind.LONG, prompts(longs.tokens), LONG_OUT, f"long-{number}", at_s))
    return Workload(tuple(asks), seconds)


def _streams(prompts: Prompts, lanes: int, seconds: float) -> Iterator[Ask]:
    """Their starts are spread, so that their prefills do not come in step."""
    each = int(seconds * FASTEST / SHORT_OUT) + 2
    for lane in range(lanes):
        for number in range(each):
            at_s = STAGGER_S * lane if number == 0 else None
            yield Ask(Kind.SHORT, prompts(SHORT_IN), SHORT_OUT, f"short-{lane}", at_s)


def chat(
    prompts: Prompts, conversations: int, turns: int, *, first: int = CHAT_FIRST, more: int = 128
) -> Workload:
    """Conversations side by side: each turn brings `more` tokens after all that was said."""
    asks = []
    for lane in range(conversations):
        for turn in range(turns):
            tokens = prompts(more if turn else first)
            asks.append(Ask(Kind.TURN, tokens, SHORT_OUT, f"chat-{lane}", grows=True))
    return Workload(tuple(asks))


def warm_up(prompts: Prompts, lengths: Sequence[int]) -> Workload:
    """Every shape that later windows have: streams together, and each length beside them."""
    asks = [
        Ask(Kind.SHORT, prompts(SHORT_IN), SHORT_OUT, f"short-{lane}")
        for lane in range(LANES)
        for _ in range(2)
    ]
    asks += [Ask(Kind.LONG, prompts(length), LONG_OUT, "long") for length in lengths]
    return Workload(tuple(asks))


def saturated(prompts: Prompts, seconds: float, clients: int, tokens: int, answer: int) -> Workload:
    """So many clients, each asking again when it has its answer. Their first answers have different
    lengths. With equal ones all prompts would come together, again and again."""
    asks = []
    for client in range(clients):
        for number in range(int(seconds * FASTEST / answer) + 2):
            at_s = None if number else STAGGER_S * client
            most = answer if number else max(1, answer * (client + 1) // clients)
            asks.append(Ask(Kind.SHORT, prompts(tokens), most, f"client-{client}", at_s))
    return Workload(tuple(asks), seconds)


def paced(
    prompts: Prompts, rate: float, shapes: Mapping[Shape, float], begin_s: float, end_s: float
) -> list[Ask]:
    """Requests at random times (Poisson), of which as many come as are expected.

    shapes: with what chance a request has each."""
    draw, count = prompts.random, max(1, round(rate * (end_s - begin_s)))
    times = sorted(draw.uniform(begin_s, end_s) for _ in range(count))
    drawn = draw.choices([*shapes], [*shapes.values()], k=count)
    return [
        Ask(Kind.SHORT, prompts(tokens), answer, f"paced-{at_s}", at_s)
        for at_s, (tokens, answer) in zip(times, drawn, strict=True)
    ]


def shared(
    prompts: Prompts, rate: float, shapes: Mapping[Shape, float], seconds: float
) -> Workload:
    """The same after one of SYSTEMS system prompts each. shapes: without these."""
    systems = [prompts(SYSTEM) for _ in range(SYSTEMS)]
    asks = paced(prompts, rate, shapes, 0.0, seconds)
    whole = [replace(one, prompt=prompts.random.choice(systems) + one.prompt) for one in asks]
    return Workload(tuple(whole), seconds)


def trace(file: Path, speed: float, vocabulary: range, *seed: object) -> list[Ask]:
    """The requests of a trace in Mooncake's format, `speed` times as fast. Equal blocks get equal
    tokens, with another seed other ones."""
    found = []
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    begin = min(line["timestamp"] for line in lines)
    for number, line in enumerate(lines):
        output = max(1, line["output_length"])
        wanted = max(1, min(line["input_length"], TRACE_MOST - output))
        prompt: tuple[int, ...] = ()
        for name in line["hash_ids"]:
            prompt += Prompts(vocabulary, *seed, "block", name)(TRACE_BLOCK)
        # What no block names is told by nobody: it is the request's own.
        rest = Prompts(vocabulary, *seed, "rest", number)
        prompt += rest(max(0, wanted - len(prompt)))
        at_s = (line["timestamp"] - begin) / 1e3 / speed
        found.append(Ask(Kind.SHORT, prompt[:wanted], output, f"trace-{number}", at_s))
    return found
