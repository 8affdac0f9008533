"""The deliveries of the jobs that run on this worker: kept alive, and settled at most once.

Life of one: `take` when it was pulled → `settle` once, or never → `end` when its run is over. A run
that ends without a settlement leaves the message to somebody else: to the job's holder, or to the
decode worker, which hands a lost holder's delivery back. asyncio thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pullfill import log
from pullfill.errors import PullfillError
from pullfill.prefill_worker.heartbeat import Heartbeat
from pullfill.queue.contract import Delivery

logger = log.get("prefill_worker.deliveries")


class Deliveries:
    """heartbeat_s: seconds between two signs of life to the queue for each job."""

    def __init__(self, heartbeat_s: Callable[[], float]) -> None:
        self._latest: dict[str, Delivery] = {}
        self._settled: dict[str, Delivery] = {}
        self._heartbeat = Heartbeat(heartbeat_s, self._latest)

    def take(self, delivery: Delivery) -> bool:
        """Whether a run must begin. If the job runs here already, its run gets this newer delivery
        to settle."""
        runs = delivery.job_id in self._latest
        self._latest[delivery.job_id] = delivery
        self._heartbeat.start()
        return not runs

    def running(self) -> Iterable[Delivery]:
        """The newest delivery of each job that runs here and is not settled."""
        return [d for d in self._latest.values() if d is not self._settled.get(d.job_id)]

    async def settle(
        self, delivery: Delivery, verb: str, reason: str = "", delay_s: float = 0.0
    ) -> None:
        """`ack`, `term` or `nak` the job's newest delivery."""
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
            # It will be redelivered and refused at the claim, or served by another worker.
            logger.warning("could not %s job %s: %s", verb, delivery.job_id, exc)

    def end(self, delivery: Delivery) -> Delivery | None:
        """The run is over. Returns a newer delivery that came meanwhile and that it did not settle:
        this worker pulled it, so it must run."""
        latest = self._latest.pop(delivery.job_id)
        settled = self._settled.pop(delivery.job_id, delivery)
        return None if latest is settled else latest
