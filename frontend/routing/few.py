"""How many decode workers get streams under the policy `pack`. Pure. choice.py asks.

A worker without streams has its time for prompts. So workers of both sides become decode workers
and prefill workers while the load is light. But streams on fewer workers have longer steps, and
prompts that the other workers cannot compute are computed beside streams. `few` returns the
smallest number with which the requests get about as many tokens per second as with the best number.
It returns more if that number has too few seats or KV blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pullfill.engine.front_wire import LoadReport
from pullfill.rate import fade

# tokens per second = streams / step with an equal part of the streams
#
# Each token needs time for prompts: what they take for each token of the answers that ended. If the
# workers without streams cannot compute all these prompts, the others compute the rest meanwhile:
#
#     tokens per second = time of the workers / (time of a token there + prompts for each token)
#
# Here all requests count as streams for which there are seats, also those whose prompts wait. So
# the number stays the same while clients that wait for their answers ask in waves.

# What share of its time a worker without streams can spend on prompts. With 0.8 prompts seemed to
# need more workers than they do, and 64 workers answered half as many conversations in time.
_IDLE = 0.95
# The best number gives at most so many times as many tokens per second as the chosen one. _BEGIN
# holds until _ENDED answers have ended: a worker that gets streams while a load begins keeps them
# for their whole answers, and it is not known yet what prompts take. With 1.04 too many workers got
# some then, and prompts were late (load `9/s` of `make sim-fleet`).
_ABOUT, _BEGIN = 1.04, 1.3
# KV blocks of the workers with streams are used to this share at most. So are their seats, until
# _ENDED answers have ended.
_FULL = 0.75
# If requests lack a seat while other workers have time, streams take at most this share of the
# seats: it is decided about a prompt only when there is a seat for it. With _FULL too many workers
# got streams when all answers began together.
_TAKEN = 0.95
# What ended answers tell of prompts and answers counts once so many have ended for each worker with
# streams. One of these workers is left out, as it may have got its first streams just now. The
# answers that end first are short. When 24 were enough for 64 workers, prompts seemed to take three
# times as long for each token of an answer as they do.
_ENDED = 24.0
# This share of a worker's time is left for its streams at least.
_LEFT = 0.02


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
    # Seconds of prompts for each token of the answers.
    prompt_tokens, tokens, ended = (sum(load.ended[part] for load in loads) for part in range(3))
    if known := ended >= _ENDED * max(1, having - 1):
        knowing = [
            (s + 1e-6) * (o.prompt_token_s > 0.0) for s, o in zip(shares, loads, strict=True)
        ]
        token_s = _mean([load.prompt_token_s for load in loads], knowing)
        # Prefill workers without a decode side compute some of them, and tell nothing here.
        asked = token_s * sum(o.prompt_tokens_per_s * fade(age_s) for o, age_s in workers)
        here = min(1.0, sum(shares) / asked) if asked else 1.0
        prompt_s = here * token_s * prompt_tokens / max(1.0, tokens)
    else:
        left = max(_LEFT, 1.0 - max(0.0, sum(shares) - _IDLE * (count - having)) / having)
        seated = min(streams, count * seats)
        prompt_s = sum(shares) * (base_s / seated + stream_s / having) / left

    def tokens_per_s(k: int) -> float:
        """Return how many tokens all answers get in a second if k workers have all streams."""
        seated, apart = min(streams, k * seats), _IDLE * (count - k)
        step_s = max(1e-9, base_s + stream_s * max(1.0, seated / k))
        stream_token_s = step_s * k / seated  # of one worker's time
        if prompt_s * k > apart * stream_token_s:  # then the others cannot compute all prompts
            return (k + apart) / (stream_token_s + prompt_s)
        return k / stream_token_s

    numbers = range(1, count + 1)
    each = [tokens_per_s(k) for k in numbers]
    enough = max(each) / (_ABOUT if known else _BEGIN)
    chosen = next(k for k, rate in zip(numbers, each, strict=True) if rate >= enough)
    if not known:
        chosen = max(chosen, math.ceil(streams / _FULL / seats))
    # If the other workers have time though requests are without a seat, their prompts wait for one.
    elif streams - 1 > chosen * seats and sum(shares) < _IDLE * (count - chosen):
        chosen = max(chosen, math.ceil(begun / _TAKEN / seats))
    return min(count, max(chosen, _for_blocks(loads)))


def _mean(told: Sequence[float], weights: Sequence[float]) -> float:
    """Return the mean of what workers tell."""
    return sum(t * w for t, w in zip(told, weights, strict=True)) / (sum(weights) or 1.0)


def _for_blocks(loads: Sequence[LoadReport]) -> int:
    """How many workers it takes for the KV blocks in use."""
    used = sum(load.active_blocks for load in loads)
    blocks = used + sum(load.free_blocks for load in loads)
    return math.ceil(len(loads) * used / blocks / _FULL) if blocks else 0
