"""One end of a job queue, with a connection of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pullfill.queue.nats_connection import NatsConnection
from pullfill.queue.streams import Names, QueueEnd
from pullfill.wire import QueueSettings

E = TypeVar("E", bound=QueueEnd)
NOT_SET = QueueSettings()


async def connected(
    kind: type[E],
    url: str,
    names: Names,
    *,
    settings: QueueSettings = NOT_SET,
    wait_s: float = 30.0,
    connect_options: Mapping[str, Any] | None = None,
) -> E:
    """A producer or consumer. Its `close` closes the connection, too."""
    connection = NatsConnection(url, kind.__name__, connect_options)
    made = kind(connection, names, settings)
    close = made.close

    async def close_both() -> None:
        await close()
        await connection.close()

    made.close = close_both  # type: ignore[method-assign]
    await connection.start(wait_s)
    return made
