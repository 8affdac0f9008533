"""The depth cache: own changes count at once, and never twice."""

from __future__ import annotations

from typing import Any

from pullfill.queue.depth import NOTICE_S, DepthCache, Snapshot, read_snapshot
from pullfill.queue.urgency import Lane, Urgency


class FakeClock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


def snapshot(jobs: int, tokens: int, last_seq: int, stream_id: str = "s") -> Snapshot:
    return Snapshot(jobs, tokens, 0, 1.0, last_seq, stream_id)


def depth(cache: DepthCache) -> tuple[int, int]:
    status = cache.status()
    return status.depth_jobs, status.depth_tokens


def test_own_publishes_are_counted_until_a_snapshot_reaches_them() -> None:
    cache = DepthCache(FakeClock())
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


def test_own_cancels_are_counted_until_a_later_snapshot() -> None:
    clock = FakeClock()
    cache = DepthCache(clock)
    cache.store(snapshot(2, 20, 5), 99.0)
    cache.cancelled(5, 10)
    assert depth(cache) == (1, 10)
    cache.published(6, 8)
    cache.cancelled(6, 8)
    assert depth(cache) == (1, 10)
    clock.now = 101.0
    cache.store(snapshot(1, 10, 6), 101.0)
    assert depth(cache) == (1, 10)


def test_another_stream_starts_over_and_nothing_goes_negative() -> None:
    cache = DepthCache(FakeClock())
    cache.store(snapshot(1, 10, 5), 99.0)
    cache.published(9, 10)
    cache.cancelled(3, 10)
    cache.cancelled(4, 10)
    cache.store(snapshot(0, 0, 0, "other"), 100.0)
    assert depth(cache) == (0, 0)
    cache.cancelled(1, 10)
    assert depth(cache) == (0, 0)


def test_ages_go_on_between_snapshots() -> None:
    clock = FakeClock()
    cache = DepthCache(clock)
    cache.store(snapshot(1, 10, 5), 100.0)
    clock.now = 102.0
    assert cache.status().oldest_age_s == 3.0
    assert cache.status().age_s == 2.0


def test_reading_what_the_server_says() -> None:
    stream: dict[str, Any] = {
        "ts": "2026-01-01T00:00:03.5Z",
        "created": "c",
        "state": {
            "first_ts": "2026-01-01T00:00:01.123456789Z",
            "last_seq": 7,
            "messages": 4,
            "subjects": {"p.job.10": 2, "p.job.64": 1, "p.job.many": 1},
        },
    }
    taken = read_snapshot(stream, [{"num_ack_pending": 1}, {}, {"num_ack_pending": 2}])
    assert (taken.jobs, taken.tokens, taken.in_flight, taken.last_seq) == (4, 84, 3, 7)
    assert 2.3 < taken.oldest_age_s < 2.4
    stream["state"] = {"first_ts": "0001-01-01T00:00:00Z", "last_seq": 7}
    empty = read_snapshot(stream, [{"num_ack_pending": 1}, {}, {"num_ack_pending": 2}])
    assert (empty.jobs, empty.tokens, empty.in_flight, empty.oldest_age_s) == (0, 0, 0, 0.0)


def test_a_job_waits_until_a_prefill_worker_has_it() -> None:
    clock = FakeClock()
    cache = DepthCache(clock)
    cache.store(Snapshot(4, 40, 2, 1.0, 5, "s"), 99.0)
    assert cache.waiting == 2
    cache.published(6, 10)
    assert cache.waiting == 3
    cache.claimed(6)
    assert cache.waiting == 2
    cache.cancelled(6, 10)
    assert cache.waiting == 2, "it did not wait any more"
    cache.claimed(4)
    cache.cancelled(4, 10)
    assert cache.waiting == 1
    cache.cancelled(5, 10)
    assert cache.waiting == 0, "it was taken back before a worker had it"
    clock.now = 101.0
    cache.store(Snapshot(2, 20, 2, 1.0, 6, "s"), 100.5)
    assert cache.waiting == 0


def test_the_number_of_waiting_jobs_is_known_without_a_look_at_each() -> None:
    """Each publish asks for it."""

    class Many:
        def __len__(self) -> int:
            return 9_000

        def __contains__(self, seq: int) -> bool:
            return seq >= 1_000

    cache = DepthCache(FakeClock())
    cache._ours = Many()  # type: ignore[assignment]
    for seq in (1_000, 1_001):
        cache.claimed(seq)
    assert cache.waiting == 8_998


def test_a_job_that_ends_while_the_server_counts_does_not_wait() -> None:
    """The server counts the job, and then nothing in flight: the job was acknowledged between."""
    clock = FakeClock()
    cache = DepthCache(clock)
    cache.store(snapshot(0, 0, 0), 99.0)
    cache.published(1, 10)
    cache.claimed(1)
    clock.now = 101.0
    cache.store(snapshot(1, 10, 1), 100.5)
    assert cache.waiting == 0, "a worker has it"
    cache.cancelled(1, 10)
    assert cache.waiting == 0, "it has ended"
    cache.published(2, 10)
    assert cache.waiting == 1


def test_workers_are_told_of_a_lane_only_if_they_may_not_know() -> None:
    clock = FakeClock()
    cache = DepthCache(clock)
    short, long = Lane(Urgency.NORMAL, 0), Lane(Urgency.NORMAL, 3)
    for seq in (1, 2, 3, 4):
        cache.published(seq, 10)
    assert cache.to_notice(short, 1)
    assert not cache.to_notice(short, 2), "they know, as the first still waits"
    assert cache.to_notice(long, 3)
    for seq in (1, 2):
        cache.claimed(seq)
    assert cache.to_notice(short, 4), "the lane may have become empty meanwhile"
    clock.now += NOTICE_S
    assert cache.to_notice(short, 5), "the last notice may have been lost"


def test_a_notice_that_was_left_out_is_made_up_for_when_the_job_before_is_claimed() -> None:
    """A free worker may have found the lane empty before the later job was stored."""
    cache, lane = DepthCache(FakeClock()), Lane(Urgency.NORMAL, 0)
    for seq in (1, 2, 3, 4):
        cache.published(seq, 10)
    assert cache.to_notice(lane, 1)
    assert not cache.to_notice(lane, 2)
    assert not cache.to_notice(lane, 3)
    assert cache.claimed(1) == lane
    assert not cache.to_notice(lane, 4), "they know, as the third still waits"
    assert cache.claimed(2) is None
    assert cache.claimed(4) is None
    assert cache.claimed(3) is None, "nothing waits any more"


def test_what_was_acked_does_not_wait_again() -> None:
    """Its delete finds nothing, because the worker that gave it up was faster."""
    cache = DepthCache(FakeClock())
    cache.store(snapshot(0, 0, 0), 99.0)
    cache.published(1, 10)
    cache.claimed(1)
    cache.forget(1)
    assert cache.waiting == 0


def test_what_a_worker_had_and_acked_is_not_remembered() -> None:
    """Else it would count for ever as in work, and a job that waits as one that does not."""
    cache = DepthCache(FakeClock())
    cache.store(Snapshot(3, 30, 3, 1.0, 3, "s"), 99.0)
    for seq in (1, 2, 3):
        cache.claimed(seq)
    cache.forget(2)
    cache.cancelled(3, 10)
    assert cache._held == {1}
    cache.published(4, 10)
    cache.claimed(4)
    cache.store(snapshot(0, 0, 3), 100.0)
    assert cache._held == {4}, "the stream holds none of the others"
    cache.store(snapshot(0, 0, 4), 100.0)
    assert cache._held == set()


def test_own_jobs_that_are_claimed_are_in_flight_at_once() -> None:
    """Until the next snapshot 64 claimed jobs counted as waiting, and prompts were `queue_full`."""
    cache = DepthCache(FakeClock())
    cache.store(snapshot(0, 0, 0), 99.0)
    for seq in range(1, 65):
        cache.published(seq, 10)
        cache.claimed(seq)
    assert (cache.status().depth_jobs, cache.status().in_flight) == (64, 64)
    cache.published(65, 10)
    assert (cache.status().depth_jobs, cache.status().in_flight) == (65, 64)
