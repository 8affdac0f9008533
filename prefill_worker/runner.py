"""Runs pulled jobs, each from its delivery until its message is settled.

    deliver → check → claim → (prefix read, compute, write) → commit → ack

The message is settled once: ack when the job is committed or not needed any more, nak when another
worker may succeed, term when the job is poison. It is not settled here if somebody else does:
another worker that holds the job, or the decode worker when the link to it broke.

While a job runs, a heartbeat keeps the queue from giving it to another worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pullfill.errors import BadMessage, ClaimRefused, Fenced, PeerUnavailable, PullfillError
from pullfill.prefill_worker import attempt
from pullfill.prefill_worker.budget import Budget
from pullfill.prefill_worker.control_connection import ConnectionLost, ControlConnection
from pullfill.prefill_worker.deliveries import Deliveries
from pullfill.prefill_worker.ending import (
    AGAIN_S,
    Calls,
    GiveUpOnce,
    Opening,
    Renewed,
    Revoked,
    TooLong,
    again_s,
    patience,
    tell_quiet,
)  # fmt: skip
from pullfill.prefill_worker.pace import Pace, Paces
from pullfill.prefill_worker.read_grants import ReadGrants
from pullfill.prefill_worker.shared_transfer_worker import OutOfReach
from pullfill.prefill_worker.task import PrefillTask
from pullfill.queue.contract import Delivery
from pullfill.runtime import failpoints, log, metrics
from pullfill.runtime.waits import Prompt
from pullfill.wire import Grant, KvMode, PrefillJob, RefuseReason, Revoke, decode, u32

if TYPE_CHECKING:
    from pullfill.prefill_worker.control_connections import ControlConnections
    from pullfill.prefill_worker.engine import PrefillEngine

logger = log.get("prefill_worker.runner")

STALE = "stale"
"""What a decode worker says of a commit whose attempt is not the current one any more."""
_GRANTED = metrics.CLAIM.labels("granted")
_TRIES_OUT_OF_REACH = 2  # deliveries; after them the decode worker computes the prompt itself


class JobRunner:
    """Runs deliveries as asyncio tasks. `idle` is set while none is under way.

    heartbeat_s, max_deliver: return the current settings of the queue. readers: decode workers that
    read our memory. on_change: called when a job has ended or the budget has room."""

    def __init__(
        self,
        links: ControlConnections,
        engine: PrefillEngine,
        *,
        heartbeat_s: Callable[[], float],
        max_prompt_tokens: int,
        max_deliver: Callable[[], int],
        readers: ReadGrants | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._links = links
        self._engine = engine
        self._max_prompt_tokens = max_prompt_tokens
        self._max_deliver = max_deliver
        self._readers = readers or ReadGrants(None)
        self._on_change = on_change
        self._running: dict[str, PrefillTask] = {}
        self._opening: dict[str, Opening] = {}
        self._jobs: dict[asyncio.Task[None], Delivery | None] = {}
        self._deliveries = Deliveries(heartbeat_s)
        self._calls = Calls()
        self._paces = Paces()
        self._budget = Budget(on_change)
        self.completed = 0
        self.failed = 0
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def in_flight(self) -> int:
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        """Number of deliveries without a grant."""
        return self._budget.waiting

    @property
    def in_flight_tokens(self) -> int:
        """Tokens that count against the budget (budget.py)."""
        return self._budget.tokens

    def start(self, delivery: Delivery) -> None:
        """Run a delivery. If its job runs here already, that run settles this newer one."""
        if not self._deliveries.take(delivery):
            return
        self._budget.pulled(delivery.job_id, delivery.tokens)
        self.idle.clear()
        task = asyncio.create_task(self._run(delivery))
        self._jobs[task] = delivery

    def _ended(self, task: asyncio.Task[None], delivery: Delivery) -> None:
        self._budget.over(delivery.job_id)
        if (newer := self._deliveries.end(delivery)) is not None:
            self.start(newer)
        self._over(task)
        self._on_change()

    async def abandon(self) -> None:
        """Stop now. Hands every job back to the queue and to its decode worker."""
        while self._jobs:
            for job in list(self._jobs):
                job.cancel()
            await asyncio.gather(*self._jobs, return_exceptions=True)
            for job, delivery in list(self._jobs.items()):
                if job.done() and delivery is not None:
                    self._ended(job, delivery)  # the task was cancelled before it began

    def running(self) -> Iterable[Delivery]:
        """The deliveries that this worker works on."""
        return self._deliveries.running()

    # ------------------------------------------------------------------ events from links

    def revoked(self, link: ControlConnection, revoke: Revoke) -> None:
        """Stop an attempt that the decode worker revokes. Answer once no copy runs."""
        if (opening := self._opening.get(revoke.job_id)) is not None:
            metrics.STALE_REFUSED.labels("revoked").inc()
            opening.revoke(revoke.attempt)
            return
        task = self._running.get(revoke.job_id)
        if task is None or task.attempt != revoke.attempt:
            return
        metrics.STALE_REFUSED.labels("revoked").inc()
        task.cancel()
        task.end(Revoked(f"revoked: {revoke.reason}"))
        self._readers.stop(task)
        self._keep(asyncio.create_task(tell_quiet(link, task, revoke.incarnation)))

    def link_lost(self, link: ControlConnection) -> None:
        """Every task granted over this connection is over."""
        instance = link.record.instance_id
        for opening in self._opening.values():
            if opening.decode_instance == instance:
                opening.lose()
        for task in list(self._running.values()):
            if self._engine.decode_instance_of(task) == instance:
                task.cancel()
                task.end(ConnectionLost(f"lost decode worker {instance}"))

    def _keep(self, task: asyncio.Task[None]) -> None:
        """Count a task among what must end before this worker is idle."""
        self._jobs[task] = None
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._jobs.pop(task, None)
        if not self._jobs:
            self.idle.set()

    # ------------------------------------------------------------------ one job

    async def _run(self, delivery: Delivery) -> None:
        try:
            await self._handle(delivery)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                # The delay lets our GiveUp reach the decode worker before another claim does.
                await self._deliveries.settle(delivery, "nak", delay_s=AGAIN_S)
            raise
        except BadMessage as exc:
            self.failed += 1
            logger.error("job %s is poison, dead-lettered: %s", delivery.job_id, exc)
            await self._deliveries.settle(delivery, "term", str(exc))
        except Exception:
            self.failed += 1
            logger.exception("job %s failed; giving it back", delivery.job_id)
            await self._deliveries.settle(delivery, "nak")
        finally:
            # A done callback would cost a turn of the loop.
            if (me := asyncio.current_task()) is not None:
                self._ended(me, delivery)

    async def _handle(self, delivery: Delivery) -> None:
        job = decode(delivery.body, PrefillJob)
        tokens = u32.unpack(job.token_ids)
        if not tokens or job.job_id != delivery.job_id:
            raise BadMessage("no tokens, or the job id is not the message's")
        failpoints.hit("prefill.before_claim")
        opening = self._opening[job.job_id] = Opening(job.decode_instance)
        try:
            if not self._links.is_up(job.decode_instance):
                self._budget.waits(job.job_id)
            link = await self._links.find(job.decode_instance)
            started = time.monotonic()
            link, grant = await self._claim(link, job, delivery, opening)
            self._budget.granted(job.job_id)
            claim_ms = (time.monotonic() - started) * 1e3
            _GRANTED.inc()
            await self._work(link, job, tokens, grant, delivery, claim_ms, opening)
        except ClaimRefused as exc:
            metrics.CLAIM.labels(exc.reason).inc()
            # The worker that holds a job in progress keeps its message alive and settles it. But
            # the last delivery is acked here: without that it would become a dead letter.
            if exc.reason != RefuseReason.IN_PROGRESS or delivery.number >= self._max_deliver():
                await self._deliveries.settle(delivery, "ack")
        except ConnectionLost as exc:
            logger.info("job %s: %s; the decode worker hands it back", job.job_id, exc)
        except PeerUnavailable as exc:
            await self._out_of_reach(job, delivery, exc)
        finally:
            self._opening.pop(job.job_id, None)

    async def _out_of_reach(
        self, job: PrefillJob, delivery: Delivery, why: PeerUnavailable
    ) -> None:
        """Settle a job that could not be claimed, because its decode worker cannot be reached. It
        must stay in the queue, and be no dead letter, until the decode worker deletes it."""
        delay_s: float | None = None
        # A decode worker that our directory does not list may be gone. Or it is not listed yet, or
        # it drains and others have a link to it. So the first delivery is left to other workers.
        if self._links.knows(job.decode_instance) or delivery.number == 1:
            delay_s = patience(job.timeout_s, delivery.number, self._max_deliver())
        logger.info("job %s: %s%s", job.job_id, why, "" if delay_s else "; dropped")
        await self._deliveries.settle(delivery, "nak" if delay_s else "ack", delay_s=delay_s or 0.0)

    async def _claim(
        self, link: ControlConnection, job: PrefillJob, delivery: Delivery, opening: Opening
    ) -> tuple[ControlConnection, Grant]:
        """Claim the job. Returns the grant and its link. Raises ClaimRefused, PeerUnavailable."""
        give_up = time.monotonic() + job.timeout_s
        while True:
            opening.lost = False
            try:
                return link, await link.claim(
                    job.job_id, job.incarnation, delivery.number, delivery.ack_subject
                )
            except ConnectionLost as lost:
                try:  # the job may have been granted: a claim over a new link tells
                    link = await self._links.find(job.decode_instance)
                except PeerUnavailable:
                    raise lost from None
            except ClaimRefused as exc:
                retry = exc.retry_after_s
                if exc.reason != RefuseReason.HELD.value or retry is None:
                    raise
                if time.monotonic() + retry > give_up:
                    raise
                self._budget.waits(job.job_id)
                await asyncio.sleep(retry)

    async def _work(
        self,
        link: ControlConnection,
        job: PrefillJob,
        tokens: list[int],
        grant: Grant,
        delivery: Delivery,
        claim_ms: float,
        opening: Opening,
    ) -> None:
        failpoints.hit("prefill.after_claim")
        give_back = GiveUpOnce(link, grant)
        if not await self._fits(job, tokens, grant, delivery, give_back):
            return
        try:
            with link.transfer_worker_held():
                await self._compute(link, job, tokens, grant, delivery, claim_ms, opening)
        except asyncio.CancelledError:
            give_back("stopping", retry=True)
            raise
        except (Revoked, Fenced) as exc:
            # Do not settle the message: it was deleted, or another worker has a newer delivery.
            self.failed += 1
            give_back(str(exc), retry=True)
            logger.info("job %s attempt %d: %s", job.job_id, grant.attempt, exc)
        except ConnectionLost:
            self.failed += 1
            raise
        except OutOfReach as exc:
            self.failed += 1
            again = delivery.number < _TRIES_OUT_OF_REACH
            give_back(str(exc), retry=again)
            if again:
                raise
            logger.warning("job %s attempt %d: %s", job.job_id, grant.attempt, exc)
            await self._deliveries.settle(delivery, "ack")
        except (PullfillError, TimeoutError) as exc:
            self.failed += 1
            logger.warning("job %s attempt %d: %s", job.job_id, grant.attempt, exc or "timeout")
            give_back(str(exc) or "timeout", retry=True)
            await self._deliveries.settle(delivery, "nak", delay_s=again_s(exc))
        except Exception:
            give_back("failed", retry=True)
            raise

    async def _fits(
        self, job: PrefillJob, tokens: list[int], grant: Grant, delivery: Delivery,
        give_back: GiveUpOnce,
    ) -> bool:  # fmt: skip
        """Whether the job can run here. If not, it is handed back and acked. Raises BadMessage if
        the job is poison. Only this check may say so: later errors are caused by peers."""
        try:
            attempt.check(
                job, delivery.body, tokens, grant, block_size=self._engine.block_size,
                compat_hash=self._engine.compat_hash, max_prompt_tokens=self._max_prompt_tokens,
            )  # fmt: skip
        except TooLong as exc:
            self.failed += 1
            logger.warning("job %s attempt %d: %s", job.job_id, grant.attempt, exc)
            give_back(str(exc), retry=False)
            await self._deliveries.settle(delivery, "ack")
            return False
        except Exception as exc:
            give_back(str(exc), retry=False)
            raise
        return True

    async def _compute(
        self,
        link: ControlConnection,
        job: PrefillJob,
        tokens: list[int],
        grant: Grant,
        delivery: Delivery,
        claim_ms: float,
        opening: Opening,
    ) -> None:
        """From the grant to the commit, or whatever ends the attempt before."""
        task: PrefillTask | None = None
        pace = Pace(self._paces, link, grant, job.timeout_s)
        try:
            if (transfer_worker := link.transfer_worker_there) is None:
                async with asyncio.timeout(pace.left_s):
                    transfer_worker = await opening.unless_over(
                        grant.attempt, link.transfer_worker()
                    )
            if grant.incarnation != link.record.incarnation:
                # The decode worker has registered again since this link was made: only a new link
                # can write into its memory.
                raise Renewed(f"{job.decode_instance} has registered again")
            opening.check(grant.attempt)
            self._opening.pop(job.job_id)
            done: Prompt[None] = Prompt(asyncio.get_running_loop())
            task = attempt.make_task(job, tokens, grant, transfer_worker, done, self._calls)
            self._running[job.job_id] = task
            pace.watch(task, done)
            self._engine.submit(task, link.record.instance_id)
            await done
            await self._commit(link, task, grant, delivery, claim_ms)
        finally:
            pace.stop()
            if task is not None:
                task.cancel()
                self._running.pop(job.job_id, None)
                self._engine.end(task)
                if task.mode is KvMode.PULL:
                    self._keep(asyncio.create_task(self._readers.let_go(task)))

    async def _commit(
        self,
        link: ControlConnection,
        task: PrefillTask,
        grant: Grant,
        delivery: Delivery,
        claim_ms: float,
    ) -> None:
        failpoints.hit("prefill.before_commit")
        measured = attempt.timings(task, delivery, claim_ms)
        if task.mode is KvMode.PULL:
            fence = self._readers.open(task)
            reply = await link.ready(lambda rid: attempt.ready(rid, task, grant, fence, measured))
        else:
            reply = await link.commit(
                lambda rid: attempt.commit(rid, task, grant, measured),
                # To compare digests it may read gigabytes. It has until the job's deadline.
                check_s=grant.deadline_s if task.digest is not None else 0.0,
            )
        failpoints.hit("prefill.before_ack")
        if reply.ok:
            self.completed += 1
        else:
            self.failed += 1
            logger.warning("commit of job %s refused: %s", task.job_id, reply.reason)
        if reply.reason != STALE:  # if stale, another worker may have the message
            await self._deliveries.settle(delivery, "ack")
