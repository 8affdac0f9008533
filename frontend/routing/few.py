"""How many decode workers get streams under the policy `pack`. Pure. choice.py asks.

A worker without streams has its time for prompts. So workers of both sides become decode workers
and prefill workers while the load is light. But streams on fewer workers have longer steps, and
prompts that the other workers cannot compute are computed beside streams. `few` returns the
smallest number with which at most _GAIN times as many requests are open as with the best number.
"""

from __future__ import annotations

import math
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
#
# Clients that wait for their answers ask in waves. Then the prompts and streams of the moment tell
# little. So prompts = tokens per second * what prompts take for each token of answers that ended.

# What share of its time a worker without streams can spend on prompts. With 0.8 prompts seemed to
# need more workers than they do, and 64 workers answered half as many conversations in time.
_IDLE = 0.95
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
# While others have time, so much of the seats may be taken: it is decided about a prompt only when
# there is a seat for it. With _FULL too many workers got streams when all answers began together.
_TAKEN = 0.95
# More workers get streams for their seats only if that makes tokens so many times as fast. Or if
# requests wait for seats, and tokens are at most so many times as slow as with the best number.
_FASTER = 1.05
# From so many ended answers on, what they tell of prompts and answers counts.
_ENDED = 24.0
# This share of a worker's time is left for its streams at least.
_LEFT = 0.02
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
    begun = sum(load.streams for load in loads) + 1
    having = max(1, sum(load.streams > 0 for load in loads))
    # A worker whose first streams have not ended does not know well what they cost. One that tells
    # nothing does not count.
    knowing = [(load.streams + 1e-6) * (load.ended[2] + 1e-6) * any(load.step_s) for load in loads]
    base_s, stream_s, kv_s = (_mean([o.step_s[part] for o in loads], knowing) for part in range(3))
    stream_s += kv_s * sum(load.stream_tokens for load in loads) / begun  # with its KV
    # A worker that does nothing tells nothing more, and its last share fades.
    shares = [load.prompt_share * fade(age_s) for load, age_s in workers]
    seats = sum(load.seats for load in loads) / count or math.inf  # of one worker
    seated = min(streams, count * seats)
    # Seconds of prompts for each token of the answers.
    prompt_tokens, tokens, ended = (sum(load.ended[part] for load in loads) for part in range(3))
    if known := ended >= _ENDED:
        knowing = [
            (s + 1e-6) * (o.prompt_token_s > 0.0) for s, o in zip(shares, loads, strict=True)
        ]
        token_s = _mean([load.prompt_token_s for load in loads], knowing)
        # Prefill workers without a decode side compute some of them, and tell nothing here.
        asked = token_s * sum(o.prompt_tokens_per_s * fade(age_s) for o, age_s in workers)
        here = min(1.0, sum(shares) / asked) if asked else 1.0
        prompt_s = here * token_s * prompt_tokens / tokens
    else:
        left = max(_LEFT, 1.0 - max(0.0, sum(shares) - _IDLE * (count - having)) / having)
        prompt_s = sum(shares) * (base_s / seated + stream_s / having) / left

    def tokens_per_s(k: int, seated: float, beside: float = 1.0) -> float:
        """Return how many tokens k workers make in a second if they have so many streams.

        beside: how many times as long a prompt takes on a worker with streams."""
        step_s, apart = base_s + stream_s * seated / k, _IDLE * (count - k)
        rate = seated / max(step_s, 1e-9)
        if rate * prompt_s > apart:  # then these k have no time left
            rate = (k + beside * apart) / (step_s * k / seated + beside * prompt_s)
        return rate

    # Tokens per second with 1, 2, ... workers. With more workers, fewer requests wait for seats.
    each = [tokens_per_s(k, min(streams, k * seats), _BESIDE) for k in range(1, count + 1)]
    enough = max(each) / _FASTER

    def needed() -> int:
        """Return how many workers it takes for the seats of the streams."""
        if not known:
            return math.ceil(max(begun / _FULL, _SEATED * streams) / seats)
        least = next(
            k for k in range(1, count + 1) if each[k - 1] >= enough or _FULL * k * seats >= streams
        )
        # If prompts do not fill the other workers now, they may wait for seats: it is decided about
        # a prompt only when there is one for it.
        idle = sum(shares) < _IDLE * (count - least)
        return max(least, math.ceil(begun / _TAKEN / seats)) if idle else least

    rate = tokens_per_s(having, seated)
    prompts = prompt_s * rate
    least = max(1, needed(), _for_blocks(loads))
    found: list[tuple[int, float]] = []
    for k in range(min(least, count), count + 1):
        apart = min(prompts, _IDLE * (count - k))
        left = max(_LEFT, 1.0 - (prompts - apart) / k)  # of the time of these k, for streams
        # Solves streams = rate * (base_s + stream_s * streams / k) / left.
        free = max(_FREE, 1.0 - rate * stream_s / left / k)
        under_way = apart + _BESIDE * (prompts - apart)
        found.append((k, rate * base_s / left / free + _FIRST * under_way))
    best = min(open_ for _, open_ in found)
    chosen = next(k for k, open_ in found if open_ <= _GAIN * best)
    # Requests that wait for a seat are late, unless some are put off. The order of prompts decides
    # that, once there are seats.
    while known and chosen < count and _TAKEN * chosen * seats < streams and each[chosen] >= enough:
        chosen += 1
    return chosen


def _mean(told: Sequence[float], weights: Sequence[float]) -> float:
    """Return the mean of what workers tell."""
    return sum(t * w for t, w in zip(told, weights, strict=True)) / (sum(weights) or 1.0)


def _for_blocks(loads: Sequence[LoadReport]) -> int:
    """How many workers it takes for the KV blocks in use."""
    used = sum(load.active_blocks for load in loads)
    blocks = used + sum(load.free_blocks for load in loads)
    return math.ceil(len(loads) * used / blocks / _FULL) if blocks else 0
