"""Settles jobs whose publish got no answer, by a publish on the void subject (names.py tells how).

Such a publish also proves that the server stores jobs. With a full disk NATS answers, counts jobs,
and stores none. It goes on so after there is room, until somebody restarts it.
"""

from __future__ import annotations

from collections.abc import Mapping

from pullfill.errors import QueueUnavailable
from pullfill.queue.contract import Receipt
from pullfill.queue.names import EXPECTED_STREAM, MSG_ID, Names
from pullfill.queue.nats_connection import ApiError, NatsConnection, NotSent, read_reply
from pullfill.runtime import log

logger = log.get("queue")

STORES_NOTHING = (
    "answers but stores no jobs: look in its log. If its disk is full, make room, then restart it. "
    "Until then prompts are prefilled locally, or by prefill workers that wait for a job"
)


async def find(connection: NatsConnection, names: Names, job_id: str, timeout_s: float) -> int:
    """Return the sequence number of the job, or of what is stored now in its place.

    Raises ApiError, QueueUnavailable."""
    headers = {MSG_ID: job_id, EXPECTED_STREAM: names.stream}
    reply = await connection.request(names.void, b"", timeout_s, headers)
    return int(read_reply(reply)["seq"])


class Proof:
    """Whether the server stores jobs. Says once that it does not."""

    def __init__(self, connection: NatsConnection, names: Names) -> None:
        self._connection = connection
        self._names = names
        self._said = False

    async def seek(self, debts: Mapping[str, Receipt | None], timeout_s: float) -> None:
        """Raise QueueUnavailable if the server stores nothing.

        debts: jobs to settle. None: the publish got no answer. Without such a job nothing is done.
        """
        owed = next((job for job, receipt in debts.items() if receipt is None), None)
        generation = self._connection.generation
        try:
            if owed is not None:
                await find(self._connection, self._names, owed, timeout_s)
        except NotSent:
            raise
        except ApiError as exc:
            if not exc.full:
                raise
        except QueueUnavailable as exc:
            if generation != self._connection.generation or not self._connection.up:
                raise  # the connection was lost meanwhile
            where = self._connection.shown_url
            if not self._said:
                logger.warning("NATS at %s %s", where, STORES_NOTHING)
            self._said = True
            raise QueueUnavailable(f"NATS at {where} {STORES_NOTHING}") from exc
        self._said = False
