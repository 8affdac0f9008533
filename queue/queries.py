"""What `pullfill doctor` and `pullfill status` ask of the queues of a namespace.

Opens a connection of its own for one call; makes and changes nothing on the server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pullfill.queue import streams
from pullfill.queue.contract import DeadLetter
from pullfill.queue.deadletter import DeadLetters
from pullfill.queue.depth import read_snapshot
from pullfill.queue.names import CONSUMER, ROOT, STREAM_PREFIX, Names
from pullfill.queue.nats_connection import ApiError, NatsConnection
from pullfill.wire import QueueStatus


@dataclass(frozen=True, slots=True)
class QueueReport:
    """One queue of the namespace. `workers_waiting`: pull requests open right now; `dead`: dead
    letters kept; `storage`: what the server says (must be "file" to survive its death)."""

    compat_hash: str
    status: QueueStatus
    workers_waiting: int
    dead: int
    storage: str
    max_jobs: int


@dataclass(frozen=True, slots=True)
class ServerReport:
    """The NATS server as seen from here, and the queues of one namespace."""

    url: str
    version: str
    max_payload: int
    queues: list[QueueReport]


async def survey(
    url: str,
    namespace: str,
    *,
    wait_s: float = 3.0,
    connect_options: Mapping[str, Any] | None = None,
) -> ServerReport:
    """Look at all queues of `namespace`. Raises QueueUnavailable when NATS or JetStream does not
    answer within about `wait_s`."""
    async with _visit(url, wait_s, connect_options) as connection:
        listing = await connection.api("STREAM.NAMES", {"subject": f"{ROOT}.{namespace}.>"})
        prefix = f"{STREAM_PREFIX}-{namespace}-"
        hashes = sorted(
            name.removeprefix(prefix)
            for name in listing.get("streams") or []
            if name.startswith(prefix) and not name.endswith("-dead")
        )
        queues = [await _report(connection, Names(namespace, one)) for one in hashes]
        client = connection.client
        version = str(client.connected_server_version)
        return ServerReport(connection.shown_url, version, client.max_payload, queues)


async def dead_letters(
    url: str,
    namespace: str,
    compat_hash: str,
    limit: int = 20,
    *,
    wait_s: float = 3.0,
    connect_options: Mapping[str, Any] | None = None,
) -> list[DeadLetter]:
    """The newest dead letters of one queue, newest first. Raises QueueUnavailable."""
    async with _visit(url, wait_s, connect_options) as connection:
        return await DeadLetters(connection, Names(namespace, compat_hash), None).read(limit)


async def _report(connection: NatsConnection, names: Names) -> QueueReport:
    stream = await connection.api(f"STREAM.INFO.{names.stream}", {"subjects_filter": names.jobs})
    consumer = await _info_or_nothing(connection, f"CONSUMER.INFO.{names.stream}.{CONSUMER}")
    dead = await _info_or_nothing(connection, f"STREAM.INFO.{names.dead_stream}")
    snapshot = read_snapshot(stream, consumer)
    return QueueReport(
        compat_hash=names.compat_hash,
        status=QueueStatus(
            depth_jobs=snapshot.jobs,
            depth_tokens=snapshot.tokens,
            in_flight=snapshot.in_flight,
            oldest_age_s=snapshot.oldest_age_s,
        ),
        workers_waiting=int(consumer.get("num_waiting", 0)),
        dead=int(dead.get("state", {}).get("messages", 0)),
        storage=str(stream["config"]["storage"]),
        max_jobs=int(stream["config"]["max_msgs"]),
    )


async def _info_or_nothing(connection: NatsConnection, operation: str) -> dict[str, Any]:
    try:
        return await connection.api(operation)
    except ApiError as exc:
        if exc.err_code in (streams.STREAM_NOT_FOUND, streams.CONSUMER_NOT_FOUND):
            return {}
        raise


@asynccontextmanager
async def _visit(
    url: str, wait_s: float, connect_options: Mapping[str, Any] | None
) -> AsyncIterator[NatsConnection]:
    async def setup() -> None:
        await connection.api("INFO")

    connection = NatsConnection(url, "survey", setup, connect_options=connect_options)
    await connection.start(wait_s)
    try:
        yield connection
    finally:
        await connection.close()
