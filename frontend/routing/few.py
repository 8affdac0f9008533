"""How many decode workers get streams under the policy `pack`. Pure. choice.py asks.

A worker without streams has its time for prompts. So workers of both sides become decode workers
and prefill workers while the load is light. But streams on fewer workers have longer steps, and
prompts that the other workers cannot compute are computed beside streams. `few` returns the
smallest number with which at most _GAIN times as many requests are open as with the best number.
"""

from __future__ import annotations

from collections.abc import Sequence

from pullfill.engine.front_wire import LoadReport
from pullfill.rate import fade

# open requests = streams + _FIRST * prompts under way
# streams = tokens per second * time of a token
# time of a token = step with an equal part of the streams / (1 - share of prompts)
# share of prompts there = what workers without streams cannot do, in equal parts
#
# If fewer workers have the streams, they must make the same tokens per second. Each has more
# streams, so its steps are longer. Longer steps make answers last longer, so there are more streams
# still. By Little's law fewer open requests mean a higher throughput, or less waiting.

# What share of its time a worker without streams can spend on prompts.
_IDLE = 0.8
# Beside streams a prompt takes about so many times as long as alone.
_BESIDE = 2.0
# A prompt under way counts as so many streams, because a first token has less time than an answer.
# With 1, streams went to a worker whose time prompts needed, and stayed for their whole answers.
_FIRST = 4.0
# So many times as many requests as with the best number may be open. A worker that gets streams
# while a load begins keeps them for their whole answers. With a smaller number too many workers
# got some, and prompts were late (load `conversations` of `make sim-fleet`).
_GAIN = 1.5
# Seats and KV blocks of the workers with streams are used to this share at most.
_FULL = 0.75
# This share of the open requests may need a seat at the same time. The rest are prompts.
_SEATED = 0.75
# A step's own time counts as this share of it at least. Else there could be streams without end,
# while clients that wait for their answers ask for no more.
_FREE = 0.05


def few(workers: Sequence[tuple[LoadReport, float]]) -> int:
    """Return how many of these workers get streams. There is one worker at least.

    workers: the last load that each has told, and its age in seconds."""
    loads, count = [load for load, _ in workers], len(workers)
    # Each request becomes a stream. After a pause of all, or in a burst, none of them is one yet. A
    # worker of an older build tells only its streams.
    streams = sum(max(load.requests, load.streams) for load in loads) + 1
    tokens = sum(load.stream_tokens for load in loads)
    # A worker that does nothing tells nothing more, and its last share fades.
    prompts = sum(load.prompt_share * fade(age_s) for load, age_s in workers)
    # A worker that had no streams does not know what they cost.
    knowing = sum(load.streams + 1e-6 for load in loads)
    base_s, stream_s, token_s = (
        sum((load.streams + 1e-6) * load.step_s[part] for load in loads) / knowing
        for part in range(3)
    )
    stream_s += token_s * tokens / streams  # with its KV

    def prompts_at(k: int) -> tuple[float, float]:
        """Return two figures for the case that k workers have streams: how many prompts are under
        way on all workers, and which share of their time these k have left for streams."""
        apart = min(prompts, _IDLE * (count - k))
        return apart + _BESIDE * (prompts - apart), max(0.02, 1.0 - (prompts - apart) / k)

    having = max(1, sum(load.streams > 0 for load in loads))
    step_s = base_s + stream_s * streams / having
    tokens_per_s = streams * prompts_at(having)[1] / max(1e-9, step_s)
    found: list[tuple[int, float]] = []
    for k in range(min(_needed(loads, streams), count), count + 1):
        under_way, left = prompts_at(k)
        # Solves streams = tokens_per_s * (base_s + stream_s * streams / k) / left.
        free = max(_FREE, 1.0 - tokens_per_s * stream_s / left / k)
        found.append((k, tokens_per_s * base_s / left / free + _FIRST * under_way))
    least = min(open_ for _, open_ in found)
    return next(k for k, open_ in found if open_ <= _GAIN * least)


def _needed(loads: list[LoadReport], streams: int) -> int:
    """How many workers it takes for the seats of all streams, and for the KV blocks in use."""
    shares = [1e-9]
    if seats := sum(load.seats for load in loads):
        begun = sum(load.streams for load in loads) + 1
        shares.append(max(begun / _FULL, _SEATED * streams) / seats)
    used = sum(load.active_blocks for load in loads)
    if blocks := used + sum(load.free_blocks for load in loads):
        shares.append(used / blocks / _FULL)
    return -int(-len(loads) * max(shares) // 1)
