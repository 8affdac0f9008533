"""One decode worker, the asker, asks NATS for the queue's depth and tells the others of its model.

    {root}.depth.want      empty: a producer wants to know the depth now
    {root}.depth.report    DepthReport: the asker's answer from NATS

There is no election. Each producer starts as an asker. An asker stops when it receives a report of
an asker with a smaller id. Any other producer sends `want` and waits for a report. If none comes
within REPORT_S, it becomes an asker. So an asker that dies is replaced the next time a producer
wants to know the depth.

These are plain NATS messages, delivered at most once. A lost one costs one request to NATS.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from pullfill.clock import SYSTEM_CLOCK
from pullfill.errors import BadMessage, QueueUnavailable
from pullfill.queue.depth import Snapshot
from pullfill.queue.names import Names
from pullfill.queue.nats_connection import NatsConnection
from pullfill.runtime import log
from pullfill.wire import DepthReport
from pullfill.wire.codec import decode, encode

REPORT_S = 0.3
"""Longer than the time between two requests of an asker plus the way of its report."""
_LOG_EVERY_S = 60.0

logger = log.get("queue")


class SharedDepth:
    """Lives as long as its producer; belongs to its loop.

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
        report = DepthReport(
            asker=self._id,
            jobs=snapshot.jobs,
            tokens=snapshot.tokens,
            in_flight=snapshot.in_flight,
            oldest_age_s=snapshot.oldest_age_s,
            last_seq=snapshot.last_seq,
            stream_id=snapshot.stream_id,
            asked_s=max(0.0, SYSTEM_CLOCK.monotonic() - asked_at),
        )
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
        snapshot = Snapshot(
            report.jobs,
            report.tokens,
            report.in_flight,
            report.oldest_age_s,
            report.last_seq,
            report.stream_id,
        )
        self._on_report(snapshot, SYSTEM_CLOCK.monotonic() - report.asked_s)
        self._heard.set()
