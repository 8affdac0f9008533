"""Queue depth without a round trip: the server's last count plus what we did since.

`DepthCache` is plain state, fed by the producer's watch task and its publishes and cancels, and
read from any thread. A snapshot says how far it reaches (`last_seq`), so our own publishes are
neither missed nor counted twice; a cancel that raced with a snapshot may be off by that one job
until the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.queue.names import round_up_tokens, subject_tokens
from pullfill.wire import QueueStatus


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the server said at one moment. `oldest_age_s` by its own clock; 0 when empty."""

    jobs: int
    tokens: int
    in_flight: int
    oldest_age_s: float
    last_seq: int
    stream_id: str


EMPTY = Snapshot(0, 0, 0, 0.0, 0, "")


def read_snapshot(stream: Mapping[str, Any], consumer: Mapping[str, Any]) -> Snapshot:
    """From STREAM.INFO (with `subjects_filter`) and CONSUMER.INFO (may be empty)."""
    state = stream["state"]
    counts: Mapping[str, int] = state.get("subjects") or {}
    jobs = sum(counts.values())
    age = 0.0
    if jobs and "ts" in stream:
        age = max(0.0, (moment(stream["ts"]) - moment(state["first_ts"])).total_seconds())
    return Snapshot(
        jobs=jobs,
        tokens=sum(count * subject_tokens(subject) for subject, count in counts.items()),
        in_flight=min(jobs, int(consumer.get("num_ack_pending", 0))),
        oldest_age_s=age,
        last_seq=int(state.get("last_seq", 0)),
        stream_id=str(stream.get("created", "")),
    )


def moment(text: str) -> datetime:
    """A server time stamp (RFC 3339 with nanoseconds)."""
    return datetime.fromisoformat(text)


class DepthCache:
    """Last snapshot + own changes since. Writers: one loop. `status()`: any thread."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._snapshot = EMPTY
        self._taken = clock.monotonic()
        self._ours: dict[int, tuple[int, float]] = {}
        self._gone: dict[int, tuple[float, int]] = {}
        self._delta = (0, 0)

    def published(self, seq: int, tokens: int) -> None:
        """Our job `seq` is stored."""
        if seq > self._snapshot.last_seq and seq not in self._ours:
            rounded = round_up_tokens(tokens)
            self._ours[seq] = rounded, self._clock.monotonic()
            self._shift(1, rounded)

    def cancelled(self, seq: int, tokens: int) -> None:
        """Stop counting our job `seq`. Its message is removed, or will be soon."""
        ours = self._ours.pop(seq, None)
        if ours is not None:
            self._shift(-1, -ours[0])
        elif seq not in self._gone:
            self._gone[seq] = (self._clock.monotonic(), rounded := round_up_tokens(tokens))
            self._shift(-1, -rounded)

    def store(self, snapshot: Snapshot, asked_at: float) -> None:
        """Take a snapshot that was asked for at `asked_at` (this cache's clock)."""
        self._ours = {s: t for s, t in self._ours.items() if s > snapshot.last_seq}
        self._gone = {s: g for s, g in self._gone.items() if g[0] >= asked_at}
        if snapshot.stream_id != self._snapshot.stream_id:
            self._ours.clear()
            self._gone.clear()
        self._snapshot, self._taken = snapshot, asked_at
        self._delta = (
            len(self._ours) - len(self._gone),
            sum(t for t, _ in self._ours.values())
            - sum(tokens for _, tokens in self._gone.values()),
        )

    def hear(self, snapshot: Snapshot, asked_at: float) -> bool:
        """Take a snapshot that another process got from the server. False: ours is newer."""
        mine = self._snapshot
        if snapshot.stream_id == mine.stream_id and snapshot.last_seq < mine.last_seq:
            return False
        self.store(snapshot, asked_at)
        return True

    def status(self) -> QueueStatus:
        """Never negative, never blocks."""
        snapshot, (jobs, tokens) = self._snapshot, self._delta
        depth = max(0, snapshot.jobs + jobs)
        figures_age = max(0.0, self._clock.monotonic() - self._taken)
        age = snapshot.oldest_age_s + figures_age
        if not snapshot.jobs:  # then the oldest is one of ours that the server has not counted yet
            age = self._age_of_ours()
        return QueueStatus(
            depth_jobs=depth,
            depth_tokens=max(0, snapshot.tokens + tokens) if depth else 0,
            in_flight=min(depth, snapshot.in_flight),
            oldest_age_s=age if depth else 0.0,
            age_s=figures_age,
        )

    def _age_of_ours(self) -> float:
        try:
            _, at = next(iter(self._ours.values()), (0, self._clock.monotonic()))
        except RuntimeError:  # the loop changed the dict during the iteration
            return 0.0
        return self._clock.monotonic() - at

    def _shift(self, jobs: int, tokens: int) -> None:
        self._delta = (self._delta[0] + jobs, self._delta[1] + tokens)
