"""The decode worker's end of the queue on JetStream.

Life: `connect` → `publish`/`cancel`/`nak` → `close`.

Refresh: a background task learns the queue's depth regularly (depth.py).

Circuit breaker: one publish or refresh without an answer opens it. Then `available` is False and
nothing is published. The next answered refresh closes it, if a job without an answer can be settled
(unsettled.py). So a server that is stopped or stores nothing costs one `publish_timeout_s`, once.

Jobs past the stream: if the server that leads the stream dies, NATS takes 4 to 9 s to elect another
leader. Meanwhile a job is sent as a request on the direct subject, and one prefill worker that
waits for a job takes it. `available` stays False until a worker has answered that it would take
one. Nothing stores such a job: if it is lost, its decode worker serves it locally.

Lanes: a job that finds others waiting is stored in a lane (urgency.py), and a notice tells workers
(lanes.py). If the cached depth is wrong about that, the job comes a millisecond later, or early.

Debts: a publish without an answer, or a cancel that could not be sent, is remembered. The next
answered refresh settles it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

from pullfill.clock import SYSTEM_CLOCK
from pullfill.errors import BadMessage, ConfigError, QueueFull, QueueUnavailable
from pullfill.queue import streams, unsettled
from pullfill.queue.contract import QueueConfig, Receipt
from pullfill.queue.deadletter import delete_message
from pullfill.queue.depth import DepthCache, SharedDepth, Snapshot, ask_depth
from pullfill.queue.lanes import send_notice
from pullfill.queue.names import (
    EXPECTED_STREAM,
    MSG_ID,
    TAKEN,
    TOKENS,
    URGENCY,
    Names,
    consumer_lane,
    parse_ack,
)
from pullfill.queue.nats_connection import (
    ApiError,
    NatsConnection,
    NoResponders,
    NotSent,
    read_reply,
)
from pullfill.queue.streams import NOT_SET, Streams
from pullfill.queue.urgency import Lane, Urgency, lane_of
from pullfill.runtime import log, timer_grid
from pullfill.runtime.health import Health
from pullfill.runtime.lifecycle import end
from pullfill.runtime.waits import Bell
from pullfill.wire import QueueSettings, QueueStatus

logger = log.get("queue")

BUSY_REFRESH_S = 0.2
"""Seconds between refreshes while the server does not answer, for BUSY_FOR_S after the depth has
kept a job local, and when another producer wants to know the depth."""
STEADY_REFRESH_S = 1.0
"""The same while jobs wait, or if some were published lately. Own changes count in between."""
IDLE_REFRESH_S = 2.0
BUSY_FOR_S = 2.0
MAX_DEBTS = 100_000
MAX_HOLES = 20_000
"""Messages that are gone from the middle of the stream. 100,000 cost 17 ms of the loop."""
JETSTREAM = "jetstream"
"""The part of the server's health that says whether it stores and counts jobs."""
_NO_STREAM = "direct"
"""The stream id in the receipt of a job that went past the stream."""


class JetStreamProducer:
    """A `JobProducer`. See the contract for what each method promises."""

    def __init__(
        self, connection: NatsConnection, config: QueueConfig, settings: QueueSettings
    ) -> None:
        self.connection = connection
        self._names = Names(config.namespace, config.compat_hash)
        self.streams = Streams(connection, self._names, config, settings)
        self._shared = SharedDepth(connection, self._names, self._on_report, self._on_want)
        self._depth = DepthCache()
        self._answering = self._takers = False
        self._debts: dict[str, Receipt | None] = {}
        self._used_at = self._asked_at = SYSTEM_CLOCK.monotonic()
        self._refused_at = -math.inf
        self._wanted = False
        self._holes = 0
        self._proof = unsettled.Proof(connection, self._names)
        self._loop = asyncio.get_running_loop()
        self._kick = Bell()
        self._cancels = asyncio.Semaphore(64)  # NATS would not answer thousands in time
        self._watcher: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls,
        url: str,
        config: QueueConfig,
        *,
        settings: QueueSettings = NOT_SET,
        wait_s: float = 30.0,
        connect_options: Mapping[str, Any] | None = None,
    ) -> Self:
        """Connect, and make the streams if they are not there.

        Raises QueueUnavailable after `wait_s`, ConfigError."""
        connection = NatsConnection(url, "producer", connect_options)
        self = cls(connection, config, settings)
        await connection.start(wait_s, self._connected, self._on_down)
        self._watcher = asyncio.create_task(self._watch(), name="queue-watch")
        return self

    async def close(self) -> None:
        await end(self._watcher, self._telling)
        self._answering = False
        await self.streams.close()
        await self.connection.close()

    @property
    def available(self) -> bool:
        answers = self._answering and self.connection.up and self.connection.health.up
        return self.past_stream or answers

    @property
    def past_stream(self) -> bool:
        """Whether jobs go past the stream now. Then `depth` is old, and must not keep jobs local:
        prefill workers themselves answer whether they would take one."""
        return self._takers and not self._answering and self.connection.up

    @property
    def max_body(self) -> int:
        """Bytes of the largest job that the server takes. 0: not known now. Any thread."""
        return self.connection.max_body

    @property
    def health(self) -> Health:
        """Whether the server answers this producer."""
        return self.connection.health

    def depth(self) -> QueueStatus:
        return self._depth.status()

    def look_again(self) -> None:
        self._refused_at = SYSTEM_CLOCK.monotonic()
        if not self._kick.rung:
            self._loop.call_soon_threadsafe(self._kick.ring)

    # ------------------------------------------------------------------ jobs

    async def publish(
        self, job_id: str, body: bytes, tokens: int, urgency: Urgency = Urgency.NORMAL
    ) -> Receipt:
        if not self.available:
            raise QueueUnavailable("the job queue does not answer now")
        self._touch()
        if not self._answering:
            return await self._hand_over(job_id, body, tokens)
        stream_id = self.streams.stream_id
        lane = lane_of(urgency, tokens) if self._depth.waiting else None
        try:
            answer = await self._store(job_id, body, tokens, urgency, lane)
        except NoResponders as exc:
            # The stream has no leader, or is gone. Then the background task makes it again.
            self._trip(exc)
            return await self._hand_over(job_id, body, tokens)
        except (NotSent, ApiError) as exc:
            if isinstance(exc, ApiError) and exc.full:
                raise QueueFull(f"the job queue is full: {exc.description}") from exc
            self._trip(exc)
            raise
        except QueueUnavailable as exc:
            self._trip(exc)
            self._owe(job_id, None)
            raise
        except asyncio.CancelledError:
            self._owe(job_id, None)
            raise
        self._debts.pop(job_id, None)
        seq, duplicate = int(answer["seq"]), bool(answer.get("duplicate", False))
        if not duplicate:
            self._depth.published(seq, tokens)
            if lane is not None and self._depth.to_notice(lane, seq):
                await send_notice(self.connection, self._names, lane)
        return Receipt(job_id, seq, duplicate, stream_id, tokens)

    async def cancel(self, receipt: Receipt) -> bool:
        self._touch()
        async with self._cancels:
            if self.available and receipt.stream_id == self.streams.stream_id:
                try:
                    return await self._remove(receipt)
                except QueueUnavailable as exc:
                    self._trip(exc)
        if self.past_stream or not self.available:
            self._owe(receipt.job_id, receipt)
        return False

    async def gone(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        stored = [receipt for receipt in receipts if receipt.stored]
        if not (stored and self._answering):
            return []
        # To list the holes costs time per hole. Beyond MAX_HOLES only the first message counts.
        ask = {"deleted_details": self._holes <= MAX_HOLES}
        try:
            info = await self.connection.api(f"STREAM.INFO.{self._names.stream}", ask, self._wait_s)
        except ApiError as exc:
            return stored if exc.err_code == streams.STREAM_NOT_FOUND else []
        except QueueUnavailable:
            return []
        state, stream_id = info["state"], str(info["created"])
        self._holes = int(state.get("num_deleted", 0))
        holes = set(state.get("deleted") or ())
        return [
            receipt
            for receipt in stored
            if receipt.stream_id != stream_id
            or receipt.seq < state["first_seq"]
            or receipt.seq in holes
        ]

    def claimed(self, receipt: Receipt) -> None:
        if receipt.stream_id != self._depth.stream_id:
            return
        if (lane := self._depth.claimed(receipt.seq)) is not None:
            self._telling = self._loop.create_task(send_notice(self.connection, self._names, lane))

    def committed(self, receipt: Receipt) -> None:
        # Not the id that `streams` knows: it knows none while the stream has no leader.
        if receipt.stream_id == self._depth.stream_id:
            self._depth.cancelled(receipt.seq, receipt.tokens)

    async def nak(self, ack_subject: str, receipt: Receipt | None) -> None:
        ack = parse_ack(ack_subject)
        if ack.stream != self._names.stream:
            raise BadMessage(f"ack subject of another queue: {ack_subject[:200]!r}")
        lane = consumer_lane(ack.consumer)
        if receipt is None or receipt.stream_id != self.streams.stream_id:
            return
        if ack.seq != receipt.seq:
            raise BadMessage(f"ack subject of another job: {ack_subject[:200]!r}")
        if self.connection.up:
            with contextlib.suppress(NotSent):
                await self.connection.publish(ack_subject, b"-NAK")
                if lane is not None:
                    await send_notice(self.connection, self._names, lane)

    async def _store(
        self, job_id: str, body: bytes, tokens: int, urgency: Urgency, lane: Lane | None
    ) -> dict[str, Any]:
        headers = {MSG_ID: job_id, TOKENS: str(tokens), EXPECTED_STREAM: self._names.stream}
        if urgency is not Urgency.NORMAL:
            headers[URGENCY] = urgency.label
        subject = self._names.job(tokens, lane)
        return read_reply(await self.connection.request(subject, body, self._wait_s, headers))

    async def _hand_over(self, job_id: str, body: bytes, tokens: int) -> Receipt:
        """Give a job directly to a prefill worker that waits for one. Nothing stores the job.

        Raises QueueUnavailable if no worker waits."""
        self._takers = await self._ask_takers(body, {MSG_ID: job_id, TOKENS: str(tokens)})
        if not self._takers:
            raise QueueUnavailable("the job queue has no leader, and no prefill worker is free")
        return Receipt(job_id, 0, stream_id=_NO_STREAM, tokens=tokens)

    async def _ask_takers(self, body: bytes, headers: dict[str, str] | None = None) -> bool:
        """Whether a prefill worker takes this job. Without a body: whether one would take a job."""
        with contextlib.suppress(QueueUnavailable):
            reply = await self.connection.request(self._names.direct, body, self._wait_s, headers)
            return bool(reply.data == TAKEN)
        return False

    async def _remove(self, receipt: Receipt) -> bool:
        there = await delete_message(self.connection, self._names.stream, receipt.seq, self._wait_s)
        if there:
            self._depth.cancelled(receipt.seq, receipt.tokens)
        else:
            self._depth.forget(receipt.seq)
        return there

    # ------------------------------------------------------------------ breaker, depth, debts

    async def _connected(self) -> None:
        await self._shared.subscribe()
        await self._setup()

    async def _setup(self) -> None:
        try:
            if not await self.streams.reconnected():
                raise QueueUnavailable("JetStream does not answer")
            # `start` returns right after this: be usable then, without waiting for the watcher.
            asked_at = SYSTEM_CLOCK.monotonic()
            self._depth.store(await ask_depth(self.connection, self._names, self._wait_s), asked_at)
        except QueueUnavailable as exc:
            if self._watcher is None:  # this is the first connection
                raise
            self._trip(exc)
            return
        self._answers()
        self._kick.ring()

    def _on_down(self) -> None:
        self._answering = self._takers = False

    def _answers(self) -> None:
        self._answering = True
        self.connection.health.ok(JETSTREAM)

    def _trip(self, why: Exception) -> None:
        if self._answering:
            logger.warning(
                "the job queue does not answer. Until it does, prompts are prefilled locally, or "
                "by prefill workers that wait for a job"
            )
        self._answering = False
        self.connection.health.failed(str(why), JETSTREAM)
        self._kick.ring()

    def _touch(self) -> None:
        rested, self._used_at = self._used_at, SYSTEM_CLOCK.monotonic()
        if self._used_at - rested > BUSY_FOR_S:
            self._kick.ring()  # this may make a refresh due earlier

    async def _watch(self) -> None:
        while True:
            await self._pause()
            if not self.connection.up:
                await self.connection.wait_up(IDLE_REFRESH_S)
                continue
            try:
                try:
                    await self._look()
                except QueueUnavailable as exc:
                    self._trip(exc)
                self._takers = not self._answering and await self._ask_takers(b"")
            except Exception as exc:  # without this task the breaker would stay open
                logger.exception("a reply of the job queue could not be handled")
                self._trip(exc)

    @property
    def _wait_s(self) -> float:
        return self.streams.publish_timeout_s

    async def _look(self) -> None:
        """Refresh the depth. If the server answers, close the breaker and settle the debts."""
        if self._answering and not self._debts and await self._shared.want():
            return
        asked_at = self._asked_at = SYSTEM_CLOCK.monotonic()
        try:
            snapshot = await ask_depth(self.connection, self._names, self._wait_s)
        except ApiError as exc:
            self._trip(exc)
            if exc.err_code in (streams.STREAM_NOT_FOUND, streams.CONSUMER_NOT_FOUND):
                with contextlib.suppress(QueueUnavailable, ConfigError):
                    await self._setup()
            return
        if not self.streams.stream_id:
            await self.streams.ensure()  # the connection came up without JetStream
        self._depth.store(snapshot, asked_at)
        self.streams.stream_id = snapshot.stream_id
        if not self._answering:
            await self._proof.seek(self._debts, self._wait_s)
            logger.info("the job queue answers again")
            self._answers()
        await self._shared.tell(snapshot, asked_at)
        await self._pay()

    def _on_want(self) -> None:
        self._wanted = True  # another producer wants a report of ours
        self._kick.ring()

    def _on_report(self, snapshot: Snapshot, asked_at: float) -> None:
        """Another producer has reported the depth."""
        if self._answering and self._depth.hear(snapshot, asked_at):
            self._asked_at = asked_at
            self.streams.stream_id = snapshot.stream_id

    async def _pause(self) -> None:
        """Sleep until the next refresh is due. A refresh costs as much as a job.

        The report of another producer postpones it."""
        while (left := self._left()) > 0 and self._answering and not self._debts:
            self._kick.clear()
            await self._kick.wait(left)
        if self._debts or not self._answering:
            await asyncio.sleep(BUSY_REFRESH_S)
        self._kick.clear()
        self._wanted = False

    def _left(self) -> float:
        """Seconds until the next refresh."""
        now = SYSTEM_CLOCK.monotonic()
        if self._wanted or now - self._refused_at < BUSY_FOR_S:
            return self._asked_at + BUSY_REFRESH_S - now
        idle = self.depth().depth_jobs == 0 and now - self._used_at > BUSY_FOR_S
        pause = IDLE_REFRESH_S if idle else STEADY_REFRESH_S
        # An asker reports once in a pause. Others must not be due within it, on grids of their own.
        pauses = 1 if self._shared.asks else 2
        return timer_grid.before(self._asked_at + pauses * pause, pause) - now

    def _owe(self, job_id: str, receipt: Receipt | None) -> None:
        if len(self._debts) < MAX_DEBTS:
            self._debts[job_id] = receipt
            self._kick.ring()

    async def _pay(self) -> None:
        """Remove jobs whose publish or cancel got no answer."""
        for job_id, receipt in list(self._debts.items()):
            try:
                if receipt is None:
                    seq = await unsettled.find(self.connection, self._names, job_id, self._wait_s)
                    receipt = Receipt(job_id, seq, True, self.streams.stream_id)
                    self._debts[job_id] = receipt
                if receipt.stream_id == self.streams.stream_id:
                    await self._remove(receipt)
            except ApiError as exc:
                logger.debug("could not remove job %s yet: %s", job_id, exc)
                continue
            except QueueUnavailable:
                return
            self._debts.pop(job_id, None)
