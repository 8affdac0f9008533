"""The depth of the queue, without a round trip for each look.

`DepthCache` holds the server's last count and what this producer did since. A snapshot says how far
it reaches (`last_seq`), so own publishes are neither missed nor counted twice. A cancel during a
snapshot may be counted wrongly until the next one.

`SharedDepth` lets one decode worker, the asker, ask NATS and tell the others of its model:

    {root}.depth.want      empty: a producer wants to know the depth now
    {root}.depth.report    DepthReport: the asker's answer from NATS

There is no election. Each producer starts as an asker. An asker stops when it receives a report of
an asker with a smaller id. Any other producer sends `want` and waits for a report. If none comes
within REPORT_S, it becomes an asker. So an asker that dies is replaced the next time a producer
wants to know the depth. These are plain NATS messages, delivered at most once. A lost one costs one
request to NATS.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.errors import BadMessage, QueueUnavailable
from pullfill.queue.names import (
    Names,
    consumer_of,
    round_up_tokens,
    subject_lane,
    subject_tokens,
)
from pullfill.queue.nats_connection import NatsConnection
from pullfill.queue.urgency import Lane
from pullfill.runtime import log
from pullfill.wire import DepthReport, QueueStatus, decode, encode

REPORT_S = 0.3
"""How long to wait for a report. Longer than an asker's pause between two requests to NATS."""
NOTICE_S = 0.2
"""Most time between two notices for one lane in which jobs wait."""
_LOG_EVERY_S = 60.0

logger = log.get("queue")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the server said at one moment. A `DepthReport` has the same fields.

    oldest_age_s: by the server's clock. 0 if the queue is empty."""

    jobs: int
    tokens: int
    in_flight: int
    oldest_age_s: float
    last_seq: int
    stream_id: str


EMPTY = Snapshot(0, 0, 0, 0.0, 0, "")


def lanes_in(stream: Mapping[str, Any]) -> set[Lane]:
    """The lanes that hold jobs, waiting or in flight, from STREAM.INFO (with `subjects_filter`)."""
    found = map(subject_lane, stream["state"].get("subjects") or ())
    return {lane for lane in found if lane is not None}


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
        last_seq=int(state.get("last_seq", 0)),
        stream_id=str(stream.get("created", "")),
    )


async def ask_depth(connection: NatsConnection, names: Names, timeout_s: float) -> Snapshot:
    """Ask the server. Raises as `NatsConnection.api`.

    If it does not answer about a lane, the jobs of this lane in flight count as waiting."""

    async def about(lane: Lane | None) -> dict[str, Any]:
        try:
            operation = f"CONSUMER.INFO.{names.stream}.{consumer_of(lane)}"
            return await connection.api(operation, None, timeout_s)
        except QueueUnavailable:
            if lane is None:
                raise
            return {}  # no worker has taken a job from this lane yet, or it has no leader

    stream, consumer = await asyncio.gather(
        connection.api(
            f"STREAM.INFO.{names.stream}", {"subjects_filter": names.all_jobs}, timeout_s
        ),
        about(None),
    )
    return read_snapshot(stream, (consumer, *await asyncio.gather(*map(about, lanes_in(stream)))))


class DepthCache:
    """Last snapshot + own changes since. Writers: one loop. `status()`: any thread."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._snapshot = EMPTY
        self._taken = clock.monotonic()
        self._ours: dict[int, tuple[int, float]] = {}
        self._gone: dict[int, tuple[float, int]] = {}
        self._delta = (0, 0)
        # Own jobs that a prefill worker has.
        self._held: set[int] = set()
        # Own jobs that the snapshot may still count as waiting, and when they ceased to wait.
        self._claimed: dict[int, float] = {}
        # The last job of each lane for which a notice was sent, when, and the last job for which
        # none was sent since (0: there is none).
        self._noticed: dict[Lane, tuple[int, float, int]] = {}

    @property
    def stream_id(self) -> str:
        """The stream that is counted. Empty: none so far."""
        return self._snapshot.stream_id

    @property
    def waiting(self) -> int:
        """Number of jobs that no prefill worker has, as far as we know. Any thread.

        The server counts jobs and jobs in flight one after the other. A job that ends in between is
        counted as a job that waits. So of our own jobs we count those in flight, too."""
        # Copies, because the loop changes these. A set difference would visit all of `_ours`.
        claimed, held = list(self._claimed), list(self._held)
        later = sum(seq in self._ours for seq in claimed)  # the snapshot has none of these
        earlier = self._snapshot.in_flight + len(claimed) - later
        own = len(self._gone) + sum(seq not in self._ours for seq in held)
        return max(0, self._snapshot.jobs - max(earlier, own) + len(self._ours) - later)

    def claimed(self, seq: int) -> Lane | None:
        """Our job `seq` waits no longer. Returns the lane that workers must be told of, if any.

        They may have found the lane empty after `seq` was delivered, and before the next job was
        stored. No notice was sent for that job, because the claim of `seq` had not come yet."""
        self._held.add(seq)
        self._claimed[seq] = self._clock.monotonic()
        for lane, (before, _, untold) in self._noticed.items():
            if before == seq and untold and untold not in self._held:
                self.to_notice(lane, untold)
                return lane
        return None

    def to_notice(self, lane: Lane, seq: int) -> bool:
        """Whether prefill workers must be told that our job `seq` waits in this lane.

        They have been told of the lane if an earlier job of ours still waits there. But a notice
        may get lost, so they are told again after NOTICE_S. See also `claimed`."""
        now = self._clock.monotonic()
        before, at, _ = self._noticed.get(lane, (0, -NOTICE_S, 0))
        if before in self._ours and before not in self._claimed and now - at < NOTICE_S:
            self._noticed[lane] = before, at, seq
            return False
        self._noticed[lane] = seq, now, 0
        return True

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
            self._claimed.pop(seq, None)
            self._shift(-1, -ours[0])
        elif seq not in self._gone:
            if seq not in self._held:
                self._claimed[seq] = self._clock.monotonic()
            self._gone[seq] = (self._clock.monotonic(), rounded := round_up_tokens(tokens))
            self._shift(-1, -rounded)
        self._held.discard(seq)

    def forget(self, seq: int) -> None:
        """Our job `seq` is in the stream no more: a prefill worker has acked it."""
        self._held.discard(seq)

    def store(self, snapshot: Snapshot, asked_at: float) -> None:
        """Take a snapshot that was asked for at `asked_at` (this cache's clock)."""
        self._ours = {s: t for s, t in self._ours.items() if s > snapshot.last_seq}
        self._gone = {s: g for s, g in self._gone.items() if g[0] >= asked_at}
        self._claimed = {
            s: at for s, at in self._claimed.items() if s in self._ours or at >= asked_at
        }
        if snapshot.stream_id != self._snapshot.stream_id:
            self._ours.clear()
            self._gone.clear()
            self._claimed.clear()
            self._held.clear()
        if not snapshot.jobs:  # the stream still has each job that a prefill worker has
            self._held = {seq for seq in self._held if seq > snapshot.last_seq}
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
            in_flight=max(0, depth - self.waiting),
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


class SharedDepth:
    """Belongs to one producer, and to its loop.

    on_report: called with a snapshot and the time, by our clock, at which the server was asked.
    on_want: called when another producer wants a report of ours.
    """

    def __init__(
        self,
        connection: NatsConnection,
        names: Names,
        on_report: Callable[[Snapshot, float], None],
        on_want: Callable[[], None],
    ) -> None:
        self.asks = True
        """Whether this producer is an asker."""
        self._connection = connection
        self._names = names
        self._on_report = on_report
        self._on_want = on_want
        self._id = secrets.token_hex(8)
        self._heard = asyncio.Event()
        self._seldom = log.Seldom(_LOG_EVERY_S)
        self._wants: Subscription | None = None

    async def subscribe(self) -> None:
        """Subscribe on a new connection. Become an asker again: the old asker may be gone."""
        self._wants = None
        await self._connection.client.subscribe(
            f"{self._names.depth}.report", cb=self._on_report_message
        )
        await self._ask_from_now_on()

    async def _ask_from_now_on(self) -> None:
        # Only askers subscribe to wants. Otherwise each decode worker would receive those of all.
        self.asks = True
        if self._wants is None:
            self._wants = await self._connection.client.subscribe(
                f"{self._names.depth}.want", cb=self._on_want_message
            )

    async def _leave_it_to_another(self) -> None:
        self.asks = False
        wants, self._wants = self._wants, None
        if wants is not None:
            await wants.unsubscribe()

    async def want(self) -> bool:
        """Ask for a report and wait for it. False: none came, or this producer is an asker."""
        if self.asks:
            return False
        self._heard.clear()
        with contextlib.suppress(TimeoutError, QueueUnavailable):
            async with asyncio.timeout(REPORT_S):
                await self._connection.publish(f"{self._names.depth}.want", b"")
                await self._heard.wait()
                return True
        with contextlib.suppress(QueueUnavailable, nats.errors.Error):
            await self._ask_from_now_on()
        return False

    async def tell(self, snapshot: Snapshot, asked_at: float) -> None:
        """Send a report, if this producer is an asker."""
        if not self.asks:
            return
        asked_s = max(0.0, SYSTEM_CLOCK.monotonic() - asked_at)
        report = DepthReport(asker=self._id, asked_s=asked_s, **asdict(snapshot))
        with contextlib.suppress(QueueUnavailable):
            await self._connection.publish(f"{self._names.depth}.report", encode(report))

    async def _on_want_message(self, _: Msg) -> None:
        if self.asks:
            self._on_want()

    async def _on_report_message(self, msg: Msg) -> None:
        try:
            report = decode(msg.data, DepthReport)
        except BadMessage as exc:
            if (more := self._seldom.due("report")) is not None:
                logger.warning("ignored a report of the queue's depth: %s%s", exc, more)
            return
        if report.asker == self._id:
            return
        if report.asker < self._id and self.asks:
            with contextlib.suppress(nats.errors.Error):
                await self._leave_it_to_another()
        snapshot = Snapshot(*(getattr(report, field.name) for field in fields(Snapshot)))
        self._on_report(snapshot, SYSTEM_CLOCK.monotonic() - report.asked_s)
        self._heard.set()
