"""Queue messages of the jobs that run on this worker. Keeps each alive and settles it at most once.

A delivery is one message that this worker has pulled. Its life: `take` when it was pulled →
`settle` once, or never → `end` when the job's run is over. To settle is to `ack`, `term` or `nak`
the message. A run may end without that, where somebody else settles the message: the worker that
holds the job, or the decode worker, which naks the delivery of a holder that it lost.

asyncio thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pullfill.errors import PullfillError
from pullfill.prefill_worker.queue_heartbeat import QueueHeartbeat
from pullfill.queue.contract import Delivery
from pullfill.runtime import log

logger = log.get("prefill_worker.deliveries")


class Deliveries:
    """See the module.

    heartbeat_s: returns the seconds between two heartbeats to the queue for each job."""

    def __init__(self, heartbeat_s: Callable[[], float]) -> None:
        self._latest: dict[str, Delivery] = {}
        self._settled: dict[str, Delivery] = {}
        self._heartbeat = QueueHeartbeat(heartbeat_s, self._latest)

    def take(self, delivery: Delivery) -> bool:
        """Register a pulled delivery. Returns whether the caller must start a run for it.

        False: the job runs here already. That run will settle this newer delivery instead of the
        one it began with."""
        runs = delivery.job_id in self._latest
        self._latest[delivery.job_id] = delivery
        self._heartbeat.start()
        return not runs

    def running(self) -> Iterable[Delivery]:
        """Return the newest delivery of each job that runs here, unless it is settled."""
        return [d for d in self._latest.values() if d is not self._settled.get(d.job_id)]

    async def settle(
        self, delivery: Delivery, verb: str, reason: str = "", delay_s: float = 0.0
    ) -> None:
        """Settle the job's newest delivery. A failure is logged, not raised.

        verb: `ack`, `term` or `nak`. reason: for `term`. delay_s: for `nak`."""
        current = self._latest.get(delivery.job_id, delivery)
        self._settled[delivery.job_id] = current
        try:
            if verb == "ack":
                await current.ack()
            elif verb == "term":
                await current.term(reason)
            else:
                await current.nak(delay_s)
        except PullfillError as exc:
            # The queue delivers the message again. Then the claim is refused, or the job runs.
            logger.warning("could not %s job %s: %s", verb, delivery.job_id, exc)

    def end(self, delivery: Delivery) -> Delivery | None:
        """Forget the job, whose run is over. Returns the delivery that must run next, or None.

        That is a newer delivery of the job, which came during the run and was not settled."""
        latest = self._latest.pop(delivery.job_id)
        settled = self._settled.pop(delivery.job_id, delivery)
        return None if latest is settled else latest
