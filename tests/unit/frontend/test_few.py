"""How many workers get streams under the policy `pack`."""

from __future__ import annotations

import pytest

from pullfill.engine.front_wire import LoadReport
from pullfill.frontend.routing.few import few
from tests.support.said import blank

# A step of a CPU core: 6 ms, 0.3 ms for each stream, 0.1 ms for 1000 tokens of their KV.
STEP_S = (0.006, 0.0003, 1e-7)


def worker(
    streams: int = 0,
    prompts: float = 0.0,
    *,
    requests: int | None = None,
    seats: int = 64,
    blocks: int = 0,
    stream_s: float = STEP_S[1],
    kv_s: float = STEP_S[2],
    age_s: float = 0.0,
) -> tuple[LoadReport, float]:
    load = blank(
        LoadReport, running=streams, active_blocks=blocks, free_blocks=1000 - blocks, seats=seats,
        requests=streams if requests is None else requests, streams=streams,
        stream_tokens=1000 * streams, prompt_share=prompts, step_s=(STEP_S[0], stream_s, kv_s),
    )  # fmt: skip
    return load, age_s


@pytest.mark.parametrize(
    ("workers", "count"),
    [
        ([worker(), worker()], 1),
        # One more worker would make tokens hardly faster.
        ([worker(1, 0.5), worker(0, 0.3)], 1),
        # Streams alone: two workers make them half as fast again.
        ([worker(30), worker(0)], 2),
        # As many, but the second worker has its time for prompts.
        ([worker(10, 0.2), worker(0, 0.8)], 1),
        # Prompts fill more than the second worker: the first one computes some of them.
        ([worker(10, 0.95), worker(10, 0.95)], 1),
        ([worker(10), *[worker(prompts=0.7)] * 3], 1),
        # The steps of one worker would be much longer.
        ([worker(40), *[worker(prompts=0.1)] * 3], 2),
        # One worker's steps would be half as long again.
        ([worker(15, 0.1), worker(15, 0.2), worker(0, 0.8), worker(0, 0.8)], 2),
        ([worker(2, seats=8), worker(seats=8)], 1),
        ([worker(2, seats=2), worker(seats=2)], 2),
        ([worker(1, blocks=900), worker(), worker()], 2),
        ([worker(8, seats=8), worker(8, seats=8)], 2),
        # Each request needs a seat soon.
        ([worker(1, seats=8, requests=16), *[worker(seats=8)] * 3], 3),
        # What streams cost is told by those that have some.
        ([worker(2), worker(stream_s=0.003)], 1),
        ([worker(2, stream_s=0.003), worker()], 2),
        # One of them has learned that their KV costs nothing. What others assume does not count.
        ([worker(10, 0.1, kv_s=0.0), worker(0, 0.2, kv_s=1e-5)], 1),
        # A share fades while its worker tells nothing new: an idle worker sends no reports.
        ([worker(15, 0.5), worker(prompts=0.5)], 1),
        ([worker(15, 0.5, age_s=60), worker(prompts=0.5, age_s=60)], 2),
        # Requests whose prompts wait become streams. After a burst nobody has streams yet, and who
        # gets them then has them for the whole answer. Older workers do not tell them.
        ([worker(1), worker(1)], 1),
        ([worker(1, requests=32), worker(1, requests=32)], 2),
        ([worker(12, requests=0), worker(12, requests=0)], 2),
    ],
)
def test_the_fewest_with_which_tokens_are_about_as_fast_as_can_be(
    workers: list[tuple[LoadReport, float]], count: int
) -> None:
    assert few(workers) == count


def gpu(
    streams: int = 0, requests: int = 0, prompts: float = 0.0, answer: int = 200, **told: float
) -> tuple[LoadReport, float]:
    """Return the load report of one GPU worker whose prompts have 1000 tokens, and its age."""
    ended, asked = told.get("ended", 33.0), told.get("asked", 0.0)  # asked: tokens per second
    kv = int(told.get("kv", 1000) * streams)
    load = blank(
        LoadReport, running=streams, seats=256, requests=requests, streams=streams,
        stream_tokens=kv, prompt_share=prompts, step_s=(0.0184, 0.0, 1.5e-8),
        prompt_token_s=6e-5 if prompts else 0.0, prompt_tokens_per_s=asked,
        ended=(1000.0 * ended, answer * ended, ended),
    )  # fmt: skip
    return load, 0.0


@pytest.mark.parametrize(
    ("workers", "count"),
    [
        # Prompts take all time of the others. More workers with streams would make fewer tokens,
        # though requests wait for seats.
        ([*[gpu(256, 512)] * 2, *[gpu(prompts=1.0)] * 6], 2),
        # Five would make as many tokens. With three, streams have too few seats.
        ([*[gpu(256, 1024)] * 2, *[gpu(prompts=1.0)] * 14], 4),
        # The others have time, so prompts wait for seats.
        ([*[gpu(256, 512)] * 2, *[gpu(prompts=0.5)] * 6], 3),
        # Answers begin and end together. The time of prompts is that of the answers that ended,
        # and so the number is the same while all compute prompts and while none does.
        ([*[gpu(10, 205, answer=1000)] * 5, *[gpu(prompts=1.0)] * 3], 4),
        ([*[gpu(150, 205, answer=1000)] * 5, *[gpu(prompts=0.3)] * 3], 4),
        # Prompts were longer. Now all workers have streams, and none has a seat left.
        ([gpu(250, 250, prompts=0.2, answer=50)] * 4, 4),
        # A worker without a stream makes no other's steps shorter.
        ([gpu(1, 1, kv=100_000), *[gpu()] * 15], 1),
        # If prefill workers compute a part of the prompts, the time of these is for streams.
        ([*[gpu(100, 220, 0.5, answer=1000, asked=3_000.0)] * 3, gpu(prompts=0.9)], 2),
        ([*[gpu(100, 220, 0.5, answer=1000, asked=30_000.0)] * 3, gpu(prompts=0.9)], 3),
        # Too few have ended for so many workers with streams, though not too few for one. What
        # prompts take now counts, and each request needs a seat.
        ([*[gpu(10, 205, answer=1000, ended=16)] * 5, *[gpu(prompts=1.0, ended=0)] * 3], 6),
        ([*[gpu(205, 205, answer=1000, ended=16)] * 5, *[gpu(ended=0)] * 3], 6),
        # One worker has just got its first streams. What the others tell counts.
        (
            [
                *[gpu(10, 205, answer=1000, ended=28)] * 4,
                *[gpu(10, 205, ended=0), *[gpu(prompts=1.0, ended=0)] * 3],
            ],
            4,
        ),
    ],
)
def test_seats_for_as_many_streams_as_prompts_allow(
    workers: list[tuple[LoadReport, float]], count: int
) -> None:
    assert few(workers) == count
