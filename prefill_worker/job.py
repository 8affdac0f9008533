"""One job on this worker, from its delivery by the queue until it is over here.

    Puller.pull → claim → (ConnectorScheduler.read_prefix) → compute_and_write → commit

These are the prefill worker's steps of docs/architecture.md. The engine reads the prefix when it
schedules the prompt.

The job's message is settled once: `ack` when the job is committed or nobody needs it any more,
`nak` when another worker may succeed, `term` when no worker can ever serve it. It is not settled
here if somebody else does that: another worker that holds the job, or the decode worker, which naks
the delivery of a holder whose connection it lost.

asyncio thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from pullfill.engine import features
from pullfill.errors import (
    BadMessage,
    ClaimRefused,
    Fenced,
    HandoffError,
    OtherVersion,
    PeerUnavailable,
    PullfillError,
)
from pullfill.net.peer_link import ConnectionLost
from pullfill.prefill_worker import job_spans
from pullfill.prefill_worker.decode_links import DecodeLink
from pullfill.prefill_worker.job_message import JobMessage, TrialDelivery, patience
from pullfill.prefill_worker.pace import Pace
from pullfill.prefill_worker.reach import OutOfReach
from pullfill.prefill_worker.task import PrefillTask, TooLong, check
from pullfill.prefill_worker.transfer_worker import TransferWorker
from pullfill.queue.contract import Delivery
from pullfill.runtime import failpoints, log, metrics
from pullfill.wire import DrainAck, Grant, KvMode, PrefillJob, RefuseReason, Revoke, decode, u32

if TYPE_CHECKING:
    from pullfill.prefill_worker.jobs import JobRunner

logger = log.get("prefill_worker.job")

AGAIN_S = 0.05  # the least time before the queue delivers a job again whose attempt failed here
_AGAIN_RENEWED_S = 0.5  # long enough for the registry's watch to show a new incarnation or worker
_READ_S = 24 * 3600.0  # pull: a safety net. The decode worker replies when its read ends
_QUIET_S = 30.0  # how long a drain waits for a revoked copy to end
_STALE = "stale"  # the decode worker's answer to a commit whose attempt is not the current one
_TRIES_OUT_OF_REACH = 2  # deliveries; after them the decode worker computes the prompt itself
_GRANTED = metrics.CLAIM.labels("granted")


class Renewed(PeerUnavailable):
    """The decode worker has a new incarnation, but our connection was made to the old one."""


class Revoked(HandoffError):
    """The decode worker took the grant back."""


class Job:
    """See the module. `run` may be called once.

    asyncio_task: runs `run`. The owner sets it.
    succeeded: whether the job was committed. None: it still runs, or others do the rest.
    connection: the one over which it is claimed, and that brought the grant. None: none yet.
    task: what the engine and the transfer worker do for the attempt, while they do it."""

    asyncio_task: asyncio.Task[None]
    job: PrefillJob
    grant: Grant
    _pace: Pace
    _done: asyncio.Future[None]

    def __init__(self, runner: JobRunner, delivery: Delivery) -> None:
        self._runner = runner
        self.job_id = delivery.job_id
        self.message = JobMessage(delivery)
        self.succeeded: bool | None = None
        self.task: PrefillTask | None = None
        self.connection: DecodeLink = None  # type: ignore[assignment]
        self._token_ids: list[int] = []
        self._claim_ms = 0.0
        # Set from the grant until the decode worker is told that the attempt is over.
        self._holds_grant = False
        # Set from the claim until there is a task. A revoke or a lost connection is only noted
        # then, because it may come before the grant was even looked at.
        self._opening = False
        self._revoked: set[int] = set()
        self._lost = False
        self._connecting: asyncio.Timeout | None = None

    async def run(self) -> None:
        """Take the job through its steps. Whatever ends it, see that its message is settled."""
        try:
            try:
                await self._steps()
            except (PullfillError, TimeoutError) as exc:
                if self._holds_grant:
                    await self._attempt_failed(exc)
                else:
                    await self._not_begun(exc)
        except asyncio.CancelledError:
            self._give_up("stopping", retry=True)
            with contextlib.suppress(Exception):
                # The delay lets our GiveUp reach the decode worker before another claim does.
                await self.message.settle("nak", delay_s=AGAIN_S)
            raise
        except Exception:
            self.succeeded = False
            self._give_up("failed", retry=True)
            logger.exception("job %s failed; its message gets a nak", self.job_id)
            await self.message.settle("nak")

    async def _steps(self) -> None:
        self._read_message()
        if self._too_long():
            return await self._leave_to_others()
        await self.claim()
        await self._check_grant()
        with self.connection.transfer.held():
            try:
                task = await self.compute_and_write()
                await self.commit(task)
            finally:
                self._end_task()

    # ------------------------------------------------------------------ step 5: claim

    async def claim(self) -> None:
        """Ask the decode worker for a grant. Raises ClaimRefused, PeerUnavailable.

        If the job's blocks are held, ask again later. If the connection breaks, ask again over a
        new one, because the job may have been granted."""
        runner, job, delivery = self._runner, self.job, self.message.first
        failpoints.hit("prefill.before_claim")
        self._opening = True
        if runner.connections.is_up(job.decode_instance):
            runner.budget.claims(self.job_id, job.decode_instance)
        else:
            runner.budget.waits(self.job_id)
        self.connection = await self._find()
        asked = time.monotonic()
        while True:
            self._lost = False
            try:
                grant = await self.connection.claim(
                    self.job_id, job.incarnation, delivery.ack_subject
                )
                break
            except ConnectionLost:
                self.connection = await self._find()
            except ClaimRefused as exc:
                wait_s = exc.retry_after_s
                if exc.reason != RefuseReason.HELD.value or wait_s is None:
                    raise
                if time.monotonic() + wait_s > asked + job.timeout_s:
                    raise
                if job.features:
                    runner.budget.in_line(self.job_id)
                else:
                    runner.budget.waits(self.job_id)
                await asyncio.sleep(wait_s)
        runner.budget.granted(self.job_id)
        self._claim_ms = (time.monotonic() - asked) * 1e3
        _GRANTED.inc()
        failpoints.hit("prefill.after_claim")
        self.grant, self._holds_grant = grant, True
        log.about(attempt=grant.attempt)
        job_spans.claimed(self, asked)

    async def _find(self) -> DecodeLink:
        links = self._runner.connections
        trial = isinstance(self.message.first, TrialDelivery)
        find = links.find_unchecked if trial else links.find
        return await find(self.job.decode_instance)

    # ------------------------------------------------------------------ step 7: compute_and_write

    async def compute_and_write(self) -> PrefillTask:
        """Have the engine compute the prompt. Wait until all its KV is written (pull mode: kept).

        The engine reads the prefix first (`ConnectorScheduler.read_prefix`). After each step it
        hands the blocks that are whole to the transfer worker (`ConnectorScheduler.step_done`).
        Raises what ends the attempt before that, for example TimeoutError at its deadline."""
        grant, connection = self.grant, self.connection
        self._pace = Pace(connection, grant, self.job.timeout_s)
        transfer_worker = connection.transfer.current or await self._connect()
        self._check_alive()
        if grant.incarnation != connection.record.incarnation:
            # The decode worker has registered again since this connection was made: only a new
            # connection can write into its memory.
            raise Renewed(f"{self.job.decode_instance} has registered again")
        if self.job.adapter is not None:
            await self._runner.engine.check_adapter(self.job.adapter)
            self._check_alive()
        self._done = asyncio.get_running_loop().create_future()
        task = PrefillTask.of(
            self.job, self._token_ids, grant, self._runner.engine.block_size, transfer_worker,
            self._on_done, self._on_computed,
        )  # fmt: skip
        self._opening, self.task = False, task
        self._pace.watch(task, self._done)
        self._runner.engine.submit(task)
        await self._done
        return task

    # ------------------------------------------------------------------ step 8: commit

    async def commit(self, task: PrefillTask) -> None:
        """Tell the decode worker that all blocks are written, or kept in pull mode. Then ack."""
        failpoints.hit("prefill.before_commit")
        incarnation = self.grant.incarnation
        timings = task.timings(self._claim_ms)
        if task.mode is KvMode.PULL:
            fence = self._runner.read_grants.open(task)
            reply = await self.connection.commit(
                lambda rid: task.ready(rid, incarnation, timings, fence), within_s=_READ_S
            )
        else:
            reply = await self.connection.commit(lambda rid: task.commit(rid, incarnation, timings))
        failpoints.hit("prefill.before_ack")
        self.succeeded = reply.ok
        if not reply.ok:
            logger.warning("commit of job %s refused: %s", self.job_id, reply.reason)
        if reply.reason != _STALE:  # if stale, another worker may have the message
            await self.message.settle("ack")

    # ------------------------------------------------------------------ parts of the steps

    def _read_message(self) -> None:
        """Decode the job. Raises BadMessage."""
        self.job = decode(self.message.first.body, PrefillJob)
        self._token_ids = u32.unpack(self.job.token_ids)
        if not self._token_ids or self.job.job_id != self.job_id:
            raise BadMessage("no tokens, or the job id is not the message's")
        log.about(request_id=self.job.request_id, decode_instance=self.job.decode_instance)

    def _too_long(self) -> bool:
        """Whether the prompt is too long for this worker, and another one may still get the job.

        The last delivery is claimed all the same, so that the decode worker learns at once."""
        first = self.message.first
        last = first.number >= self._runner.max_deliver() or not first.ack_subject
        return len(self._token_ids) > self._runner.max_prompt_tokens and not last

    async def _leave_to_others(self) -> None:
        """Give a job back that was not claimed. Its next delivery comes later each time."""
        logger.info(
            "job %s: a prompt of %d tokens is longer than this worker takes (%d); left to others",
            self.job_id, len(self._token_ids), self._runner.max_prompt_tokens,
        )  # fmt: skip
        delay_s = _AGAIN_RENEWED_S * (self.message.first.number - 1) or AGAIN_S
        self._runner.on_unreachable(delay_s)
        await self.message.settle("nak", delay_s=delay_s)

    async def _check_grant(self) -> None:
        """Check that the job is the one that was granted, and that it fits here.

        If it is not, give up for good, and raise BadMessage or TooLong."""
        engine = self._runner.engine
        try:
            brought = ""
            if self.grant.features:  # on a thread: 8 MiB take 10 ms
                brought = await asyncio.to_thread(features.digest, self.grant.features)
            check(
                self.job, self.message.first.body, self._token_ids, self.grant, brought,
                block_size=engine.block_size, compat_hash=engine.compat_hash,
                max_prompt_tokens=self._runner.max_prompt_tokens, groups=engine.groups,
            )  # fmt: skip
        except Exception as exc:
            self._give_up(str(exc), retry=False)
            raise

    async def _connect(self) -> TransferWorker:
        """Connect to the decode worker's KV memory, unless the attempt ends before that."""
        try:
            async with asyncio.timeout(self._pace.left_s) as self._connecting:
                return await self.connection.transfer.get()
        except (PullfillError, TimeoutError):
            self._check_alive()
            raise
        finally:
            self._connecting = None

    def _check_alive(self) -> None:
        """Raise what ended the attempt before it had a task."""
        if self.grant.attempt in self._revoked:
            raise Revoked("revoked before it began")
        if self._lost:
            raise ConnectionLost(f"lost decode worker {self.job.decode_instance}")

    def _on_computed(self) -> None:
        """The prompt is computed. Engine thread."""
        if self._runner.by_prompt:
            call = self._done.get_loop().call_soon_threadsafe
            call(self._runner.budget.computed, self.job_id)

    def _on_done(self, failure: BaseException | None) -> None:
        """The task has ended. From any thread."""
        if failure is not None and not isinstance(failure, PullfillError):
            failure = HandoffError(repr(failure))
        self._done.get_loop().call_soon_threadsafe(self._resume, failure)

    def _resume(self, failure: BaseException | None) -> None:
        if self._done.done():
            return
        if failure is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(failure)

    def _end_task(self) -> None:
        task, self.task = self.task, None
        if task is None:
            return
        self._pace.stop()
        task.cancel()
        self._runner.engine.end(task)
        if task.mode is KvMode.PULL:
            self._runner.keep(self._runner.read_grants.let_go(task))

    # ------------------------------------------------------------------ what ends it early

    def revoke(self, connection: DecodeLink, revoke: Revoke) -> None:
        """Stop an attempt that the decode worker revokes. Answer once no copy runs."""
        task = self.task
        if self._opening:
            metrics.STALE_REFUSED.labels("revoked").inc()
            self._revoked.add(revoke.attempt)
            if self._holds_grant and revoke.attempt == self.grant.attempt:
                self._stop_connecting()
        elif task is not None and task.attempt == revoke.attempt:
            metrics.STALE_REFUSED.labels("revoked").inc()
            task.cancel()
            task.end(Revoked(f"revoked: {revoke.reason}"))
            self._runner.read_grants.stop(task)
            self._runner.keep(self._drain(connection, task))

    def connection_lost(self, connection: DecodeLink) -> None:
        """End the attempt if it was granted, or is being claimed, over this connection."""
        under_way = self._opening or self.task is not None
        if not under_way or self.connection is not connection:
            return
        if self.task is None:
            self._lost = True
            self._stop_connecting()
        else:
            self.task.cancel()
            self.task.end(ConnectionLost(f"lost decode worker {connection.name}"))

    def _stop_connecting(self) -> None:
        if self._connecting is not None and not self._connecting.expired():
            self._connecting.reschedule(asyncio.get_running_loop().time())

    async def _not_begun(self, why: PullfillError | TimeoutError) -> None:
        """Settle a job that this worker did not begin, or leave that to its holder."""
        match why:
            case OtherVersion():
                # A worker of its version can do it. After the last delivery its decode worker must
                # see that nobody will.
                logger.warning("job %s is left to other workers: %s", self.job_id, why)
                last = self.message.first.number >= self._runner.max_deliver()
                await self.message.settle("ack" if last else "nak", delay_s=_AGAIN_RENEWED_S)
            case BadMessage():
                self.succeeded = False
                logger.error("job %s is poison, dead-lettered: %s", self.job_id, why)
                await self.message.settle("term", str(why))
            case TooLong():
                self.succeeded = False
                logger.warning("job %s attempt %d: %s", self.job_id, self.grant.attempt, why)
                await self.message.settle("ack")
            case ClaimRefused():
                metrics.CLAIM.labels(why.reason).inc()
                # The worker that holds a job in progress keeps its message alive and settles it.
                # But the last delivery is acked here: or it would become a dead letter.
                last = self.message.first.number >= self._runner.max_deliver()
                if why.reason != RefuseReason.IN_PROGRESS or last:
                    await self.message.settle("ack")
            case PeerUnavailable():
                # The decode worker naks a delivery only if it has granted the job. If its grant is
                # lost on the way, both nak. The extra delivery then finds the job in progress.
                await self._unreachable(why)
            case _:
                raise why

    async def _attempt_failed(self, why: PullfillError | TimeoutError) -> None:
        """Give the attempt up. Settle the message, unless somebody else does.

        Here a BadMessage is a peer's fault and not the job's, which was checked before."""
        self.succeeded, attempt = False, self.grant.attempt
        retry = not isinstance(why, OutOfReach) or self.message.first.number < _TRIES_OUT_OF_REACH
        if not isinstance(why, ConnectionLost):
            self._give_up(str(why) or "timeout", retry=retry)
        match why:
            case ConnectionLost():
                logger.info("job %s: %s; the decode worker naks it", self.job_id, why)
            case Revoked() | Fenced():
                # Do not settle the message: it was deleted, or another worker has a newer delivery.
                logger.info("job %s attempt %d: %s", self.job_id, attempt, why)
            case OutOfReach() if retry:
                self._runner.on_unreachable(_AGAIN_RENEWED_S)
                await self.message.settle("nak", delay_s=_AGAIN_RENEWED_S)
            case OutOfReach():
                logger.warning("job %s attempt %d: %s", self.job_id, attempt, why)
                await self.message.settle("ack")
            case _:
                logger.warning("job %s attempt %d: %s", self.job_id, attempt, why or "timeout")
                again_s = _AGAIN_RENEWED_S if isinstance(why, Renewed) else AGAIN_S
                await self.message.settle("nak", delay_s=again_s)

    async def _unreachable(self, why: PeerUnavailable) -> None:
        """Settle a job whose decode worker cannot be reached.

        It must stay in the queue, and be no dead letter, until the decode worker deletes it."""
        job, number = self.job, self.message.first.number
        delay_s = patience(job.timeout_s, number, self._runner.max_deliver())
        # _lost: the connection broke under our claim. It may drain, connected to others.
        if self._lost or self._runner.connections.knows(job.decode_instance):
            self._runner.on_unreachable(delay_s or 0.0)
        elif delay_s is not None:
            # It may be gone. Or it is not listed yet, or it drains. So others get the first chance.
            delay_s = max(delay_s, _AGAIN_RENEWED_S) if number == 1 else None
        logger.info("job %s: %s%s", self.job_id, why, "" if delay_s else "; dropped")
        await self.message.settle("nak" if delay_s else "ack", delay_s=delay_s or 0.0)

    def _give_up(self, cause: str, *, retry: bool) -> None:
        """Tell the decode worker that the attempt is over here. Once, and only with a grant."""
        if self._holds_grant:
            self._holds_grant = self._opening = False  # so a late revoke finds nothing
            self.connection.give_up(self.grant, cause, retry=retry)

    async def _drain(self, connection: DecodeLink, task: PrefillTask) -> None:
        """Answer a revoke as soon as no copy of the task runs."""
        if await task.drained(_QUIET_S):
            connection.send(DrainAck())
