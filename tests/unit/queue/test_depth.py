"""The depth cache: own changes count at once, and never twice."""

from __future__ import annotations

from pullfill.queue.depth import DepthCache, Snapshot
from tests.support.fakes import FakeClock


def snapshot(jobs: int, tokens: int, last_seq: int, *, in_flight: int = 0) -> Snapshot:
    return Snapshot(jobs, tokens, in_flight, 1.0, 0, last_seq, "s")


def depth(cache: DepthCache) -> tuple[int, int]:
    status = cache.status()
    return status.depth_jobs, status.depth_tokens


def test_own_publishes_are_counted_until_a_snapshot_reaches_them() -> None:
    cache = DepthCache(FakeClock(100.0))
    cache.store(snapshot(2, 20, 5), 99.0)
    cache.published(5, 10)
    assert depth(cache) == (2, 20), "the snapshot already had it"
    cache.published(6, 10)
    cache.published(7, 30)
    assert depth(cache) == (4, 60)
    cache.store(snapshot(3, 30, 6), 100.0)
    assert depth(cache) == (4, 60)
    cache.store(snapshot(4, 60, 7), 100.0)
    assert depth(cache) == (4, 60)


def test_own_jobs_that_are_claimed_are_in_flight_at_once() -> None:
    """Until the next snapshot 64 claimed jobs counted as waiting, and prompts were `queue_full`."""
    cache = DepthCache(FakeClock(100.0))
    cache.store(snapshot(3, 30, 0, in_flight=2), 99.0)
    for seq in range(1, 65):
        cache.published(seq, 10)
        cache.claimed(seq)
        cache.claimed(seq)
    cache.claimed(1000)
    assert (cache.status().depth_jobs, cache.status().in_flight) == (67, 66)
    cache.published(65, 10)
    assert (cache.status().depth_jobs, cache.status().in_flight) == (68, 66)
    cache.store(snapshot(68, 680, 65, in_flight=66), 100.0)
    assert (cache.status().depth_jobs, cache.status().in_flight) == (68, 66)
    for seq in range(1, 65):
        cache.ended(seq)
    assert (cache.status().depth_jobs, cache.status().in_flight) == (4, 2)
