"""How many decode workers get streams under the policy `pack`. Pure.

A worker without streams has its time for prompts: with workers of both sides that makes decode
workers and prefill workers while the load is light. Streams on fewer workers have longer steps. And
prompts that the other workers cannot compute are computed beside streams. So it is the fewest
workers with which about as few requests are open as can be:

    time of a token = step with an equal part of the streams / (1 - share of prompts)
    share of prompts there = what workers without streams cannot do, in equal parts
    open requests = streams, in proportion to the time of a token + FIRST * prompts under way

By Little's law fewer open requests are a higher throughput, and less waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pullfill.engine.front_wire import LoadReport
from pullfill.rate import fade

# What share of its time a worker without streams can spend on prompts.
_IDLE = 0.8
# Beside streams a prompt takes about so many times as long as alone.
_BESIDE = 2.0
# A prompt under way counts as so many streams, because a first token has less time than an answer.
# With 1, streams went to a worker whose time prompts needed, and stayed for their whole answers.
_FIRST = 4.0
# So many times as few requests have to be open, or one more worker gets no streams.
_GAIN = 1.1
# Seats and KV blocks of the workers with streams are used to this share at most.
_FULL = 0.75


class Told(NamedTuple):
    """What a worker has told, and for how many seconds nothing new."""

    load: LoadReport
    age_s: float


def few(workers: Sequence[Told]) -> int:
    """Return how many of these workers get streams. There is one worker at least."""
    loads, count = [one.load for one in workers], len(workers)
    # Each request becomes a stream. After a pause of all, or in a burst, none of them is one yet. A
    # worker of an older build tells only its streams.
    streams = sum(max(load.requests, load.streams) for load in loads) + 1
    tokens = sum(load.stream_tokens for load in loads)
    # A worker that does nothing tells nothing more, and its last share fades.
    prompts = sum(one.load.prompt_share * fade(one.age_s) for one in workers)
    # A worker that had no streams does not know what they cost.
    knowing = sum(load.streams + 1e-6 for load in loads)
    base_s, stream_s, token_s = (
        sum((load.streams + 1e-6) * load.step_s[part] for load in loads) / knowing
        for part in range(3)
    )
    found: list[tuple[int, float, float]] = []
    for k in range(min(_needed(loads), count), count + 1):
        apart = min(prompts, _IDLE * (count - k))
        share = (prompts - apart) / k
        step_s = base_s + (stream_s * streams + token_s * tokens) / k
        found.append((k, step_s / max(0.02, 1.0 - share), apart + _BESIDE * (prompts - apart)))
    fastest_s = max(1e-9, min(one_s for _, one_s, _ in found))
    best, fewest = float("inf"), count
    for k, one_s, under_way in found:
        if (open_ := streams * one_s / fastest_s + _FIRST * under_way) * _GAIN < best:
            best, fewest = open_, k
    return fewest


def _needed(loads: list[LoadReport]) -> int:
    """How many workers it takes for the seats of all streams, and for the KV blocks in use."""
    shares = [1e-9]
    for used, whole in (
        (sum(w.streams for w in loads) + 1, sum(w.seats for w in loads)),
        (
            sum(w.active_blocks for w in loads),
            sum(w.active_blocks + w.free_blocks for w in loads),
        ),
    ):
        if whole:
            shares.append(used / whole / _FULL)
    return -int(-len(loads) * max(shares) // 1)
