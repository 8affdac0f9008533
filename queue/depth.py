"""The depth of the queue, without a round trip for each look.

`DepthCache` holds the server's last count of the jobs of others, and knows this producer's own jobs
exactly. A snapshot says how far it reaches (`last_seq`), so own jobs are neither missed nor counted
twice. A job that ends during a snapshot may be counted wrongly until the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.queue.contract import Urgency
from pullfill.queue.nats_connection import ApiError, NatsConnection
from pullfill.queue.streams import Names, consumer_of, round_up_tokens, subject_tokens
from pullfill.wire import QueueStatus


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the server said at one moment.

    oldest_age_s: by the server's clock. 0 if the queue is empty.
    first_seq: number of the oldest message that is there."""

    jobs: int
    tokens: int
    in_flight: int
    oldest_age_s: float
    first_seq: int
    last_seq: int
    stream_id: str


def read_snapshot(
    stream: Mapping[str, Any], consumers: Iterable[Mapping[str, Any]] = ()
) -> Snapshot:
    """From STREAM.INFO (with `subjects_filter`) and the CONSUMER.INFO of consumers."""
    state = stream["state"]
    counts: Mapping[str, int] = state.get("subjects") or {}
    jobs = sum(counts.values())
    age = 0.0
    if jobs and "ts" in stream:
        now, first = map(datetime.fromisoformat, (stream["ts"], state["first_ts"]))
        age = max(0.0, (now - first).total_seconds())
    return Snapshot(
        jobs=jobs,
        tokens=sum(count * subject_tokens(subject) for subject, count in counts.items()),
        in_flight=min(jobs, sum(int(one.get("num_ack_pending", 0)) for one in consumers)),
        oldest_age_s=age,
        first_seq=int(state.get("first_seq", 0)),
        last_seq=int(state.get("last_seq", 0)),
        stream_id=str(stream.get("created", "")),
    )


async def ask_depth(connection: NatsConnection, names: Names, timeout_s: float) -> Snapshot:
    """Ask the server. Raises as `NatsConnection.api`.

    If a consumer is missing, or has no leader, its jobs in flight count as waiting."""

    async def about(urgency: Urgency) -> dict[str, Any]:
        try:
            operation = f"CONSUMER.INFO.{names.stream}.{consumer_of(urgency)}"
            return await connection.api(operation, None, timeout_s)
        except ApiError:
            return {}

    ask = {"subjects_filter": names.all_jobs}
    stream = await connection.api(f"STREAM.INFO.{names.stream}", ask, timeout_s)
    if not stream["state"].get("subjects"):
        return read_snapshot(stream)
    return read_snapshot(stream, await asyncio.gather(*map(about, Urgency)))


@dataclass(slots=True)
class _Own:
    """A job of this producer that has not ended."""

    tokens: int
    at: float
    claimed: bool = False


class DepthCache:
    """Writers: one loop. `status()`: any thread."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._taken = clock.monotonic()
        self.stream_id = ""
        """The stream that is counted. Empty: none so far."""
        self._last_seq, self._oldest_at = 0, 0.0
        self._own: dict[int, _Own] = {}
        # Jobs, tokens, jobs in flight. `_others` is of the last snapshot.
        self._others = self._ours = (0, 0, 0)

    def published(self, seq: int, tokens: int) -> None:
        """Our job `seq` is stored."""
        if seq in self._own:
            return
        own = self._own[seq] = _Own(round_up_tokens(tokens), self._clock.monotonic())
        self._ours = _plus(self._ours, (1, own.tokens, 0))
        if seq <= self._last_seq:  # the snapshot came before the answer to our publish
            self._others = _plus(self._others, (-1, -own.tokens, 0))

    def claimed(self, seq: int) -> None:
        """A prefill worker has our job `seq`."""
        if (own := self._own.get(seq)) is not None and not own.claimed:
            own.claimed = True
            self._ours = _plus(self._ours, (0, 0, 1))

    def ended(self, seq: int) -> None:
        """Stop counting our job `seq`. Its message is removed, or will be soon."""
        if (own := self._own.pop(seq, None)) is not None:
            self._ours = _plus(self._ours, (-1, -own.tokens, -own.claimed))

    def store(self, snapshot: Snapshot, asked_at: float) -> None:
        """Take a snapshot that was asked for at `asked_at` (this cache's clock)."""
        # What is older than the oldest message, or was in another stream, has ended unnoticed.
        same = snapshot.stream_id == self.stream_id
        for seq in [seq for seq in self._own if seq < snapshot.first_seq or not same]:
            self.ended(seq)
        self.stream_id, self._last_seq = snapshot.stream_id, snapshot.last_seq
        self._taken, self._oldest_at = asked_at, asked_at - snapshot.oldest_age_s
        self._others = snapshot.jobs, snapshot.tokens, snapshot.in_flight
        for seq, own in self._own.items():
            if seq <= snapshot.last_seq:
                self._others = _plus(self._others, (-1, -own.tokens, -own.claimed))

    def status(self) -> QueueStatus:
        """Never negative, never blocks."""
        now, others, ours = self._clock.monotonic(), self._others, self._ours
        oldest_at = self._oldest_at
        if not others[0]:
            try:
                oldest_at = next(iter(self._own.values())).at
            except (StopIteration, RuntimeError):  # the loop changed the dict meanwhile
                oldest_at = now
        depth = others[0] + ours[0]
        return QueueStatus(
            depth_jobs=depth,
            depth_tokens=ours[1] + (others[1] if others[0] else 0),
            in_flight=min(depth, others[2] + ours[2]),
            oldest_age_s=max(0.0, now - oldest_at) if depth else 0.0,
            age_s=max(0.0, now - self._taken),
        )


_Counts = tuple[int, int, int]


def _plus(has: _Counts, more: _Counts) -> _Counts:
    return max(0, has[0] + more[0]), max(0, has[1] + more[1]), max(0, has[2] + more[2])
