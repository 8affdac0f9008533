"""The jobs of this worker: starts them, knows which run, and stops them.

While jobs run, heartbeats keep the queue from giving them to other workers. One timer serves all
jobs. The first job starts it, and it repeats while any job runs. A job that starts mid-interval
gets its first heartbeat early. The gap never exceeds `heartbeat_s`.

asyncio thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from pullfill.errors import ClaimRefused, PullfillError
from pullfill.prefill_worker import job_spans
from pullfill.prefill_worker.budget import Budget
from pullfill.prefill_worker.decode_links import DecodeLink
from pullfill.prefill_worker.job import Job
from pullfill.prefill_worker.job_message import TrialDelivery
from pullfill.prefill_worker.read_grants import ReadGrants
from pullfill.queue.contract import Delivery
from pullfill.runtime import log
from pullfill.snapshot import FLOWS, HeldJob
from pullfill.wire import PrefillJob, RefuseReason, Revoke, Trial, decode, u32

if TYPE_CHECKING:
    from pullfill.prefill_worker.decode_links import DecodeLinks
    from pullfill.prefill_worker.engine import PrefillEngine

_HELD_S = 0.05


class JobRunner:
    """Runs a `Job` for each delivery. Its public attributes are what the jobs share.

    no_jobs: set while no job runs. idle: set while nothing that `keep` runs goes on either.
    heartbeat_s: returns the seconds between two heartbeats for each job.
    max_deliver: returns how often the queue delivers a job at most.
    read_grants: of the decode workers that read our memory.
    by_prompt: whether the budget counts prompts that are not computed (budget.py).
    on_change: called when a job has ended or the budget has room.
    on_unreachable: called for each job whose decode worker is in the directory, but to which this
    worker cannot bring KV, or not that of a prompt so long. Other prefill workers may be able to.
    It gets the seconds until the queue delivers the job again.
    take_back: takes a delivery whose job this process has asked for itself. Returns False for any
    other. Raises ClaimRefused if another prefill worker has the job."""

    def __init__(
        self,
        connections: DecodeLinks,
        engine: PrefillEngine,
        *,
        heartbeat_s: Callable[[], float],
        max_prompt_tokens: int,
        max_deliver: Callable[[], int],
        read_grants: ReadGrants | None = None,
        on_change: Callable[[], None] = lambda: None,
        take_back: Callable[[Delivery], bool] = lambda _: False,
        by_prompt: bool = False,
    ) -> None:
        self.connections = connections
        self.engine = engine
        self.max_prompt_tokens = max_prompt_tokens
        self.max_deliver = max_deliver
        self.read_grants = read_grants or ReadGrants(None)
        self.budget = Budget(on_change)
        self.by_prompt = by_prompt
        self._heartbeat_s = heartbeat_s
        self._on_change = on_change
        self._take_back = take_back
        self.on_unreachable: Callable[[float], None] = lambda _again_s: None
        self._jobs: dict[str, Job] = {}
        self._kept: set[asyncio.Task[None]] = set()
        self._sends_heartbeats = False
        self._heartbeats: asyncio.Task[None] | None = None
        self.completed = 0
        self.failed = 0
        self.no_jobs, self.idle = asyncio.Event(), asyncio.Event()
        self._look_if_idle()

    @property
    def in_flight(self) -> int:
        """Jobs that run here."""
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        """Number of deliveries without a grant."""
        return self.budget.waiting

    @property
    def in_flight_tokens(self) -> int:
        """Tokens that count against the budget (budget.py)."""
        return self.budget.tokens

    @property
    def uncomputed(self) -> int:
        """Jobs that count against `--concurrency` (budget.py)."""
        return self.budget.uncomputed

    def held(self) -> list[HeldJob]:
        """Return the jobs that run here, for the live page. Only when somebody looks."""
        now = time.monotonic()
        return [
            HeldJob(job_id=job.job_id, computed=task.computed, kv_s=task.computed_for(now))
            if (task := job.task) is not None
            else HeldJob(job_id=job.job_id)
            for job in list(self._jobs.values())[:FLOWS]
        ]

    def start_trial(self, trial: Trial) -> None:
        """Run a job that a decode worker has sent for its self-check. Raises BadMessage."""
        job = decode(trial.job, PrefillJob)
        self.start(TrialDelivery(job.job_id, trial.job, len(u32.unpack(job.token_ids))))

    def start(self, delivery: Delivery) -> None:
        """Run a delivery. If its job runs here already, that run settles this newer one."""
        if (job := self._jobs.get(delivery.job_id)) is not None:
            job.message.latest = delivery
            return
        try:
            own = self._take_back(delivery)
        except ClaimRefused as exc:
            own = delivery.number >= self.max_deliver()  # or it would become a dead letter
            if not own and exc.reason == RefuseReason.HELD:
                # No worker has it. Ask again, ever later: its last writer is soon proved quiet.
                self.keep(_given_back(delivery, _HELD_S * 4**delivery.number))
            if not own:
                return  # the worker that has the job settles it
        if own:
            self.keep(_acked(delivery))
            return
        job = self._jobs[delivery.job_id] = Job(self, delivery)
        self.budget.pulled(delivery.job_id, delivery.tokens)
        self.no_jobs.clear()
        self.idle.clear()
        if not self._sends_heartbeats:
            self._sends_heartbeats = True
            self._set_heartbeat_timer()
        job.asyncio_task = asyncio.create_task(self._run(job))

    async def abandon(self) -> None:
        """Stop now. Give every attempt up, and nak its message.

        What `keep` runs goes on: the engine may stay, and must get its blocks back."""
        while self._jobs:
            tasks = [job.asyncio_task for job in self._jobs.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for job in list(self._jobs.values()):
                if job.asyncio_task.done():
                    self._ended(job)  # it was cancelled before it began

    def revoked(self, connection: DecodeLink, revoke: Revoke) -> None:
        """Stop an attempt that the decode worker revokes. Answer once no copy runs."""
        if (job := self._jobs.get(revoke.job_id)) is not None:
            job.revoke(connection, revoke)

    def connection_lost(self, connection: DecodeLink) -> None:
        """End every attempt that was granted over this connection."""
        for job in self._jobs.values():
            job.connection_lost(connection)

    async def _run(self, job: Job) -> None:
        began = time.monotonic()
        log.about(job_id=job.job_id)
        try:
            await job.run()
        finally:
            job_spans.ended(job, began)
            self._ended(job)  # here, because a done callback would cost a turn of the loop

    def _ended(self, job: Job) -> None:
        del self._jobs[job.job_id]
        if job.succeeded is not None:
            self.completed += job.succeeded
            self.failed += not job.succeeded
        self.budget.over(job.job_id)
        if (newer := job.message.left_over) is not None:
            self.start(newer)
        self._look_if_idle()
        self._on_change()

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what may go on after its job, until this worker is idle."""
        self.idle.clear()
        task = asyncio.create_task(work)
        self._kept.add(task)
        task.add_done_callback(self._kept_over)

    def _kept_over(self, task: asyncio.Task[None]) -> None:
        self._kept.discard(task)
        self._look_if_idle()

    def _look_if_idle(self) -> None:
        if not self._jobs:
            self.no_jobs.set()
            if not self._kept:
                self.idle.set()

    # ------------------------------------------------------------------ heartbeats to the queue

    def _set_heartbeat_timer(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_at(loop.time() + self._heartbeat_s(), self._heartbeats_due)

    def _heartbeats_due(self) -> None:
        if self._jobs:
            self._heartbeats = asyncio.create_task(self._send_heartbeats())
        else:
            self._sends_heartbeats = False

    async def _send_heartbeats(self) -> None:
        self._set_heartbeat_timer()
        for job in list(self._jobs.values()):
            await job.message.heartbeat()


async def _given_back(delivery: Delivery, delay_s: float) -> None:
    with contextlib.suppress(PullfillError):
        await delivery.nak(delay_s)


async def _acked(delivery: Delivery) -> None:
    with contextlib.suppress(PullfillError):  # if it fails, the queue delivers it again
        await delivery.ack()
