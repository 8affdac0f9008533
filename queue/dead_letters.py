"""Dead letters: jobs nobody may try again, moved to a bounded second stream for people.

A job gets here by `term`, or because `max_deliver` deliveries ended in silence. In the second case
the server keeps the message, and sends one advisory when the last `ack_wait` ends, to one of the
consumers. A consumer that connects looks for jobs whose advisory nobody heard. Two workers that
move the same job leave one record (`Nats-Msg-Id`).
"""

from __future__ import annotations

import base64
import contextlib
from typing import Annotated

import msgspec
from nats.aio.msg import Msg

from pullfill.errors import PullfillError
from pullfill.queue.contract import Urgency
from pullfill.queue.nats_connection import (
    API_TIMEOUT_S,
    HEADER_ROOM,
    ApiError,
    NatsConnection,
    read_reply,
)
from pullfill.queue.streams import DELIVERIES, JOB_ID, MSG_ID, REASON, Names, consumer_of
from pullfill.runtime import log, metrics

logger = log.get("queue")


class DeadLetters:
    """Writes the dead stream of one queue, for one consumer."""

    def __init__(self, connection: NatsConnection, names: Names) -> None:
        self._connection = connection
        self._names = names

    async def write(self, job_id: str, reason: str, deliveries: int, body: bytes) -> None:
        """Store one record. The same job again changes nothing. Raises QueueUnavailable."""
        room = self._connection.client.max_payload - HEADER_ROOM
        headers = {
            MSG_ID: f"dead-{job_id}",
            JOB_ID: job_id,
            REASON: _one_line(reason),
            DELIVERIES: str(deliveries),
        }
        reply = await self._connection.request(
            self._names.dead, body[:room], API_TIMEOUT_S, headers
        )
        if read_reply(reply).get("duplicate"):
            return
        metrics.DEAD_LETTER.inc()
        logger.warning(
            "job %s is dead after %d deliveries: %s", job_id, deliveries, reason,
            extra=log.ids(job_id=job_id),
        )  # fmt: skip

    async def collect(self) -> None:
        """Move jobs that used up their deliveries. Call it on each new connection."""
        subject = f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{self._names.stream}.*"
        await self._connection.client.subscribe(subject, queue="pullfill", cb=self._on_advisory)

    async def _on_advisory(self, msg: Msg) -> None:
        try:
            advisory = msgspec.json.decode(msg.data, type=_Advisory)
            await self._move(advisory.stream_seq, advisory.deliveries)
        except (PullfillError, msgspec.MsgspecError, KeyError, TypeError, ValueError) as exc:
            logger.warning("could not move a job that used up its deliveries: %s", exc)

    async def sweep(self) -> None:
        """Move the jobs whose advisory nobody heard. Call it after `collect`. Never raises."""
        # The last delivery may have ended the only prefill worker, and the decode worker too, which
        # would delete the message. It would count in the depth and in the oldest age for an hour.
        with contextlib.suppress(PullfillError, KeyError, TypeError, ValueError):
            for urgency in Urgency:
                await self._sweep(urgency)

    async def _sweep(self, urgency: Urgency) -> None:
        stream, api = self._names.stream, self._connection.api
        about = await api(f"CONSUMER.INFO.{stream}.{consumer_of(urgency)}")
        # Such a message was delivered, and is not in flight. The server does not list those in
        # flight, so nothing is moved while there are any.
        seq, last = 0, 0 if about["num_ack_pending"] else about["delivered"]["stream_seq"]
        while seq < last:
            ask = {"seq": seq + 1, "next_by_subj": self._names.jobs_of(urgency)}
            try:
                answer = await api(f"STREAM.MSG.GET.{stream}", ask)
            except ApiError:
                return  # there is none
            if (seq := int(answer["message"]["seq"])) <= last:
                await self._move(seq, 0)

    async def _move(self, seq: int, deliveries: int) -> None:
        message = await get_message(self._connection, self._names.stream, seq)
        if message is None:
            return
        headers, body = message
        await self.write(headers.get(MSG_ID, f"seq-{seq}"), "max_deliver", deliveries, body)
        await delete_message(self._connection, self._names.stream, seq)


async def get_message(
    connection: NatsConnection, stream: str, seq: int
) -> tuple[dict[str, str], bytes] | None:
    """Headers and body of one stored message. None if it is not there."""
    try:
        answer = await connection.api(f"STREAM.MSG.GET.{stream}", {"seq": seq})
    except ApiError as exc:
        if exc.code == 404 or exc.code == 400:
            return None
        raise
    message = answer["message"]
    lines = base64.b64decode(message.get("hdrs", "")).decode("utf-8", "replace").split("\r\n")
    pairs = (line.partition(":") for line in lines[1:])
    headers = {name.strip(): value.strip() for name, colon, value in pairs if colon}
    return headers, base64.b64decode(message.get("data", ""))


async def delete_message(
    connection: NatsConnection, stream: str, seq: int, timeout_s: float = API_TIMEOUT_S
) -> bool:
    """Remove one stored message, in flight or not. False: it was not there."""
    ask = {"seq": seq, "no_erase": True}
    try:
        await connection.api(f"STREAM.MSG.DELETE.{stream}", ask, timeout_s)
    except ApiError as exc:
        if exc.code == 503:
            raise
        return False
    return True


class _Advisory(msgspec.Struct):
    """What we need of the server's MAX_DELIVERIES advisory."""

    stream_seq: Annotated[int, msgspec.Meta(ge=1)]
    deliveries: int = 0


def _one_line(text: str) -> str:
    return " ".join(text.split())[:1000]
