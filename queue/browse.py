"""Looks into the job queues of a namespace, for people: `pullfill queue`. `purge` deletes.

It needs no more rights at NATS than a worker has. Ages are by the server's clock.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from typing import Any

import msgspec

from pullfill.errors import BadMessage
from pullfill.queue.deadletter import delete_message, read_message
from pullfill.queue.depth import ask_depth
from pullfill.queue.names import (
    DELIVERIES,
    JOB_ID,
    MSG_ID,
    REASON,
    TOKENS,
    Names,
    subject_lane,
    subject_tokens,
)
from pullfill.queue.nats_connection import ApiError, NatsConnection
from pullfill.wire import PrefillJob, decode

_DEAD = "-dead"


class QueueRow(msgspec.Struct, frozen=True):
    """One queue. name: the compatibility hash of its workers. dead: number of dead letters."""

    name: str
    jobs: int
    tokens: int
    in_flight: int
    oldest_age_s: float
    dead: int


class JobRow(msgspec.Struct, frozen=True):
    """One stored job, waiting or in flight. lane: empty if it is in none.

    request_id, decode_instance: empty if the body cannot be read."""

    seq: int
    job_id: str
    tokens: int
    lane: str
    age_s: float
    request_id: str = ""
    decode_instance: str = ""


class DeadRow(msgspec.Struct, frozen=True):
    """One dead letter. The fields are those of JobRow, and why it is dead."""

    seq: int
    job_id: str
    reason: str
    deliveries: int
    age_s: float
    request_id: str = ""
    decode_instance: str = ""


@contextlib.asynccontextmanager
async def opened(
    url: str, options: Mapping[str, Any], wait_s: float = 5.0
) -> AsyncIterator[NatsConnection]:
    """Connect to NATS. Raises QueueUnavailable, ConfigError."""

    async def nothing() -> None:
        """Streams are the workers' to make."""

    connection = NatsConnection(url, "browse", options)
    await connection.start(wait_s, nothing)
    try:
        yield connection
    finally:
        await connection.close()


async def queues(connection: NatsConnection, namespace: str) -> list[QueueRow]:
    """Return the queues of the namespace, by name."""
    found: list[str] = []
    while True:
        ask = {"subject": f"pullfill.{namespace}.>", "offset": len(found)}
        answer = await connection.api("STREAM.NAMES", ask)
        page = answer.get("streams") or []
        found += page
        if not page or len(found) >= int(answer.get("total", 0)):
            break
    head = f"PULLFILL-{namespace}-"
    names = [n.removeprefix(head) for n in found if n.startswith(head) and not n.endswith(_DEAD)]
    return [await _row(connection, Names(namespace, name), name) for name in sorted(names)]


async def _row(connection: NatsConnection, names: Names, name: str) -> QueueRow:
    depth = await ask_depth(connection, names, 2.0)
    dead = 0
    with contextlib.suppress(ApiError):  # it is made with the first consumer
        info = await connection.api(f"STREAM.INFO.{names.dead_stream}")
        dead = int(info["state"]["messages"])
    return QueueRow(name, depth.jobs, depth.tokens, depth.in_flight, depth.oldest_age_s, dead)


async def jobs(connection: NatsConnection, names: Names, most: int) -> list[JobRow]:
    """Return the oldest jobs of a queue, `most` of them."""
    rows = []
    async for seq, subject, headers, body, age_s in _messages(
        connection, names.stream, names.all_jobs, most
    ):
        lane = subject_lane(subject)
        exact = headers.get(TOKENS, "")
        rows.append(
            JobRow(
                seq,
                headers.get(MSG_ID, ""),
                int(exact) if exact.isdecimal() else subject_tokens(subject),
                lane.label if lane else "",
                age_s,
                *_people(body),
            )
        )
    return rows


async def dead(connection: NatsConnection, names: Names, most: int) -> list[DeadRow]:
    """Return the oldest dead letters of a queue, `most` of them."""
    rows = []
    async for seq, _, headers, body, age_s in _messages(
        connection, names.dead_stream, names.dead, most
    ):
        count = headers.get(DELIVERIES, "")
        rows.append(
            DeadRow(
                seq,
                headers.get(JOB_ID, ""),
                headers.get(REASON, ""),
                int(count) if count.isdecimal() else 0,
                age_s,
                *_people(body),
            )
        )
    return rows


async def purge(connection: NatsConnection, names: Names, *, letters: bool) -> int:
    """Delete all jobs of a queue, or its dead letters. Return how many.

    Within a second the decode workers see that jobs are gone, and compute the prompts."""
    stream, subject = names.stream, names.all_jobs
    if letters:
        stream, subject = names.dead_stream, names.dead
    gone = 0
    async for seq, *_ in _messages(connection, stream, subject, None):
        gone += await delete_message(connection, stream, seq)
    return gone


async def _messages(
    connection: NatsConnection, stream: str, subject: str, most: int | None
) -> AsyncIterator[tuple[int, str, dict[str, str], bytes, float]]:
    """Yield number, subject, headers, body and age of messages, oldest first.

    Those that come meanwhile are left out. most: None: all that are there now."""
    try:
        info = await connection.api(f"STREAM.INFO.{stream}")
    except ApiError:
        return  # there is no such stream yet
    now, last = datetime.fromisoformat(info["ts"]), int(info["state"]["last_seq"])
    seq = given = 0
    while most is None or given < most:
        ask = {"seq": seq + 1, "next_by_subj": subject}
        try:
            message = (await connection.api(f"STREAM.MSG.GET.{stream}", ask))["message"]
        except ApiError as exc:
            if exc.code == 503:
                raise
            return
        seq = int(message["seq"])
        if seq > last:
            return
        given += 1
        headers, body = read_message(message)
        age_s = max(0.0, (now - datetime.fromisoformat(message["time"])).total_seconds())
        yield seq, str(message["subject"]), headers, body, age_s


def _people(body: bytes) -> tuple[str, str]:
    """Return request and decode worker of a job. Empty: the body is no job, or was cut off."""
    try:
        job = decode(body, PrefillJob)
    except BadMessage:
        return "", ""
    return job.request_id, job.decode_instance
