"""A job's message in the queue, on the worker that has pulled it: kept alive, settled at most once.

The queue may deliver a message again while its job runs here. Heartbeats and the settling always go
to the newest delivery. To settle is to `ack`, `nak` or `term` the message.

asyncio thread only.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Literal

from pullfill.errors import PullfillError
from pullfill.queue.contract import Delivery
from pullfill.runtime import failpoints, log

logger = log.get("prefill_worker.job_message")

_FIRST_NAK_S, _NAK_SOONEST_S = 0.05, 0.5


class JobMessage:
    """See the module.

    first: the delivery that began the job's run.
    latest: the newest delivery. The owner replaces it when the queue delivers the message again."""

    def __init__(self, delivery: Delivery) -> None:
        self.first = self.latest = delivery
        self._settled: Delivery | None = None

    @property
    def to_settle(self) -> Delivery | None:
        """The newest delivery, unless it is settled."""
        return None if self.latest is self._settled else self.latest

    @property
    def left_over(self) -> Delivery | None:
        """After the run: a newer delivery, which the run did not settle. It must run next.

        A run that settled nothing leaves its own delivery to somebody else."""
        return None if self.latest is (self._settled or self.first) else self.latest

    async def heartbeat(self) -> None:
        """Keep the queue from giving the job to another worker."""
        with contextlib.suppress(PullfillError, failpoints.FailpointError):
            failpoints.hit("prefill.heartbeat")
            await self.latest.in_progress()

    async def settle(
        self, verb: Literal["ack", "nak", "term"], reason: str = "", delay_s: float = 0.0
    ) -> None:
        """Settle the newest delivery. A failure is logged, not raised.

        reason: for `term`.
        delay_s: for `nak`."""
        latest = self._settled = self.latest
        try:
            if verb == "ack":
                await latest.ack()
            elif verb == "term":
                await latest.term(reason)
            else:
                await latest.nak(delay_s)
        except PullfillError as exc:
            # The queue delivers the message again. Then the claim is refused, or the job runs.
            logger.warning("could not %s job %s: %s", verb, latest.job_id, exc)


@dataclass(slots=True)
class TrialDelivery:
    """Looks like the delivery of a job that came past the queue, for a self-check. There is no
    message to settle."""

    job_id: str
    body: bytes
    tokens: int
    number: int = 1
    ack_subject: str = ""

    async def ack(self) -> None:
        """See the class."""

    async def nak(self, delay_s: float = 0.0) -> None:
        """See the class."""

    async def term(self, reason: str) -> None:
        """See the class."""

    async def in_progress(self) -> None:
        """See the class."""


def patience(timeout_s: float, delivery: int, max_deliver: int) -> float | None:
    """Return how long the queue must hold back a job whose decode worker cannot be reached.

    The first time is short: another worker may reach it. The last one is the job's `timeout_s`,
    after which the decode worker has given the job up. Then None: nobody needs the job, so settle
    it. The age of the job is not used, because it depends on NATS's clock, which may be set.

    delivery: the number of this delivery, from 1."""
    if delivery >= max_deliver:
        return None
    if delivery == 1 < max_deliver - 1:
        return _FIRST_NAK_S
    share = 4 ** (max_deliver - 1 - delivery)
    return max(_NAK_SOONEST_S, timeout_s / float(share))
