"""What is asked of the systems: prompts and answers of one length. The same seed, the same asks."""

from __future__ import annotations

import random
from collections.abc import Iterator

from benchmarks.published.figures import Shape
from benchmarks.serving.contract import Ask, Kind
from benchmarks.serving.workloads import FASTEST, Prompts, Workload

LANES = 8
"""Requests under way for each device in a saturated window."""
SETTLES = 1 / 3
"""Share of a saturated window before tokens are counted. It begins with prompts only."""
BURSTINESS = 100.0
"""As in the published command: times between requests are gamma distributed with this shape, so
they are nearly equal."""


def saturated(prompts: Prompts, shape: Shape, seconds: float, lanes: int) -> Workload:
    """`lanes` requests at any time: each lane asks again when it has its answer."""
    each = int(seconds * FASTEST / shape.answer) + 2
    asks = [
        Ask(Kind.SHORT, prompts(shape.prompt), shape.answer, f"lane-{lane}")
        for lane in range(lanes)
        for _ in range(each)
    ]
    return Workload(tuple(asks), seconds)


def paced(prompts: Prompts, shape: Shape, rate: float, seconds: float) -> Workload:
    """`rate` requests per second, whether the earlier ones are answered or not."""
    asks = [
        Ask(Kind.SHORT, prompts(shape.prompt), shape.answer, f"open-{number}", at_s)
        for number, at_s in enumerate(moments(prompts.random, rate, seconds))
    ]
    return Workload(tuple(asks), seconds)


def moments(rng: random.Random, rate: float, seconds: float) -> Iterator[float]:
    """When requests are sent, in seconds."""
    at_s = 0.0
    while at_s < seconds:
        yield at_s
        at_s += rng.gammavariate(BURSTINESS, 1.0 / (rate * BURSTINESS))
