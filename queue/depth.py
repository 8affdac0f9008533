"""The depth of the queue, without a round trip for each look.

`DepthCache` holds the server's last count of the jobs of others, and knows this producer's own jobs
exactly. A snapshot says how far it reaches (`last_seq`), so own jobs are neither missed nor counted
twice. A job that ends during a snapshot may be counted wrongly until the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.queue.contract import Urgency
from pullfill.queue.nats_connection import ApiError, NatsConnection
from pullfill.queue.streams import Names, consumer_of, round_up_tokens, subject_tokens
from pullfill.wire import QueueStatus


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the server said at one moment."""

    jobs: int
    tokens: int
    in_flight: int
    oldest_age_s: float  # by the server's clock. 0 if the queue is empty
    first_seq: int  # of the oldest message that is there
    last_seq: int
    stream_id: str
    # Messages that are gone from the middle of the stream: how many, and which, if that was asked.
    num_holes: int = 0
    holes: frozenset[int] = frozenset()

    def lost(self, seq: int) -> bool:
        """Whether message `seq` of this stream was there and is gone."""
        return seq <= self.last_seq and (seq < self.first_seq or seq in self.holes)


# To list the holes costs time per hole, 17 ms of the loop for 100,000, and one old message keeps
# the holes of all later ones. Beyond so many only the oldest message counts.
MAX_HOLES = 20_000


async def ask_depth(
    connection: NatsConnection, names: Names, timeout_s: float, *, holes: bool
) -> Snapshot:
    """Ask the server. Raises as `NatsConnection.api`.

    holes: ask which messages are gone from the middle of the stream.

    If a consumer is missing, or has no leader, its jobs in flight count as waiting."""

    async def claimed(urgency: Urgency) -> int:
        try:
            operation = f"CONSUMER.INFO.{names.stream}.{consumer_of(urgency)}"
            about = await connection.api(operation, None, timeout_s)
        except ApiError:
            return 0
        return int(about.get("num_ack_pending", 0))

    ask = {"subjects_filter": names.all_jobs, "deleted_details": holes}
    stream = await connection.api(f"STREAM.INFO.{names.stream}", ask, timeout_s)
    state = stream["state"]
    counts: Mapping[str, int] = state.get("subjects") or {}
    jobs, in_flight, age = sum(counts.values()), 0, 0.0
    if jobs:
        in_flight = sum(await asyncio.gather(*map(claimed, Urgency)))
    if jobs and "ts" in stream:
        now, first = map(datetime.fromisoformat, (stream["ts"], state["first_ts"]))
        age = max(0.0, (now - first).total_seconds())
    return Snapshot(
        jobs=jobs,
        tokens=sum(count * subject_tokens(subject) for subject, count in counts.items()),
        in_flight=min(jobs, in_flight),
        oldest_age_s=age,
        first_seq=int(state.get("first_seq", 0)),
        last_seq=int(state.get("last_seq", 0)),
        stream_id=str(stream.get("created", "")),
        num_holes=int(state.get("num_deleted", 0)),
        holes=frozenset(state.get("deleted") or ()),
    )


@dataclass(slots=True)
class _Own:
    """A job of this producer that has not ended."""

    tokens: int
    at: float
    claimed: bool = False


class DepthCache:
    """Writers: one loop. `status()`: any thread.

    snapshot: the last one. Without a stream's id: there was none so far."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._taken = clock.monotonic()
        self.snapshot = Snapshot(0, 0, 0, 0.0, 0, 0, "")
        self._oldest_at = 0.0
        self._own: dict[int, _Own] = {}
        # Jobs, tokens and jobs in flight of others, as of the last snapshot.
        self._others = (0, 0, 0)

    def published(self, seq: int, tokens: int) -> None:
        """Our job `seq` is stored."""
        if seq not in self._own:
            own = self._own[seq] = _Own(round_up_tokens(tokens), self._clock.monotonic())
            if seq <= self.snapshot.last_seq:  # the snapshot came before the answer to our publish
                self._exclude(own)

    def claimed(self, seq: int) -> None:
        """A prefill worker has our job `seq`."""
        if (own := self._own.get(seq)) is not None:
            own.claimed = True

    def ended(self, seq: int) -> None:
        """Stop counting our job `seq`. Its message is removed, or will be soon."""
        self._own.pop(seq, None)

    def lost(self, seq: int, stream_id: str) -> bool:
        """Whether a message that was stored in this stream is there no more."""
        return stream_id != self.snapshot.stream_id or self.snapshot.lost(seq)

    def store(self, snapshot: Snapshot, asked_at: float) -> None:
        """Take a snapshot that was asked for at `asked_at` (this cache's clock)."""
        same = snapshot.stream_id == self.snapshot.stream_id
        for seq in [seq for seq in self._own if snapshot.lost(seq) or not same]:
            self.ended(seq)  # unnoticed
        self.snapshot = snapshot
        self._taken, self._oldest_at = asked_at, asked_at - snapshot.oldest_age_s
        self._others = snapshot.jobs, snapshot.tokens, snapshot.in_flight
        for seq, own in self._own.items():
            if seq <= snapshot.last_seq:
                self._exclude(own)

    def _exclude(self, own: _Own) -> None:
        """The last snapshot counts this job of ours."""
        jobs, tokens, in_flight = self._others
        self._others = (
            max(0, jobs - 1), max(0, tokens - own.tokens), max(0, in_flight - own.claimed),
        )  # fmt: skip

    def status(self) -> QueueStatus:
        """Never negative, never blocks."""
        now, own = self._clock.monotonic(), list(self._own.values())
        jobs, tokens, in_flight = self._others
        oldest_at = self._oldest_at if jobs else min((one.at for one in own), default=now)
        depth = jobs + len(own)
        return QueueStatus(
            depth_jobs=depth,
            depth_tokens=sum(one.tokens for one in own) + (tokens if jobs else 0),
            in_flight=min(depth, in_flight + sum(one.claimed for one in own)),
            oldest_age_s=max(0.0, now - oldest_at) if depth else 0.0,
            age_s=max(0.0, now - self._taken),
        )
