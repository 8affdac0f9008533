"""One delivery of one job from JetStream, settled through the consumer that pulled it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nats.aio.msg import Msg

from pullfill.queue.contract import DeadLetter, Delivery
from pullfill.queue.names import (
    BUSY,
    MSG_ID,
    TAKEN,
    TOKENS,
    URGENCY,
    AckInfo,
    consumer_lane,
    parse_ack,
    subject_tokens,
)
from pullfill.queue.nats_connection import NatsConnection, NotSent
from pullfill.queue.urgency import read_urgency
from pullfill.runtime import log

if TYPE_CHECKING:
    from pullfill.queue.consumer import JetStreamConsumer

logger = log.get("queue")

IN_PROGRESS = b"+WPI"
_NO_ACK = AckInfo("", "", 1, 0, 0)
_TIMER_S = 0.005
"""NATS may deliver a job so much later than the delay of its nak says. A worker that asks before
that finds the lane empty."""


class JetStreamDelivery:
    """A `Delivery` of the job stream. It can be settled after a reconnect, too.

    It remembers the id of the stream that it was pulled from. If the server loses its data, the
    same ack subject may mean another job. Then this delivery settles nothing.

    lane: where the job waited. None: in no lane. pending: jobs that still wait there.
    past_stream: the job came on the direct subject. There is no message to settle. If the job is
    not done, its decode worker serves it, after the claim timeout at the latest.

    Raises BadMessage if the message is no delivery.
    """

    def __init__(self, owner: JetStreamConsumer, msg: Msg, *, past_stream: bool = False) -> None:
        headers = msg.headers or {}
        ack = _NO_ACK if past_stream else parse_ack(msg.reply)
        self.job_id: str = (headers.get(MSG_ID) or f"seq-{ack.seq}")[:128]
        self.body: bytes = msg.data
        self.tokens: int = _tokens(msg)
        self.urgency = read_urgency(headers.get(URGENCY))
        self.lane = None if past_stream else consumer_lane(ack.consumer)
        self.pending = ack.pending
        self.number: int = ack.number
        self.ack_subject: str = "" if past_stream else msg.reply
        self._owner = owner
        self._stream_id = owner.stream_id
        self._past_stream = self._settled = past_stream
        self._asker = msg.reply if past_stream else ""

    async def accept(self) -> None:
        """Tell the producer of a job past the stream that this worker has it. Never raises."""
        await self._answer(TAKEN)

    async def _answer(self, answer: bytes) -> None:
        asker, self._asker = self._asker, ""
        if asker:
            with contextlib.suppress(NotSent):
                await self._owner.connection.publish(asker, answer)

    async def ack(self) -> None:
        if not self._settled:
            self._settled = True
            await self._owner.acks.send(self._stream_id, self.ack_subject)

    async def nak(self, delay_s: float = 0.0) -> None:
        await self._answer(BUSY)
        if self._settled:
            return
        self._settled = True
        delay = b' {"delay": %d}' % int(delay_s * 1e9) if delay_s > 0 else b""
        await self._owner.tell(self._stream_id, self.ack_subject, b"-NAK" + delay)
        if self.lane is not None:
            await self._owner.lanes.notice(self.lane, delay_s and delay_s + _TIMER_S)

    async def term(self, reason: str) -> None:
        if self._past_stream:
            logger.warning("job %s is poison: %s", self.job_id, reason)
        elif not self._settled:
            letter = DeadLetter(self.job_id, reason, self.number, self.body)
            await self._owner.letters.write(letter)
            await self._owner.settle(self._stream_id, self.ack_subject, b"+TERM")
            self._settled = True

    async def in_progress(self) -> None:
        if not self._settled:
            await self._owner.tell(self._stream_id, self.ack_subject, IN_PROGRESS)

    def obsolete(self, stream_id: str) -> bool:
        """Whether it needs no heartbeat: it is settled, or its stream is gone."""
        return self._settled or self._stream_id != stream_id


async def send_signs(
    connection: NatsConnection, running: Iterable[Delivery], stream_id: str, timeout_s: float
) -> None:
    """Send a heartbeat for each running delivery of this stream. Raises QueueUnavailable.

    Waits for the answer to the last one only. The server reads them in order."""
    signs = [
        d.ack_subject
        for d in running
        if isinstance(d, JetStreamDelivery) and not d.obsolete(stream_id)
    ]
    for subject in signs[:-1]:
        await connection.publish(subject, IN_PROGRESS)
    for subject in signs[-1:]:
        await connection.request(subject, IN_PROGRESS, timeout_s)


def _tokens(msg: Msg) -> int:
    told = (msg.headers or {}).get(TOKENS, "")
    if told.isascii() and told.isdigit() and len(told) < 12:
        return int(told)
    return subject_tokens(msg.subject)
