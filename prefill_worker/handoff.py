"""One job on this worker, from its delivery by the queue until its message is settled.

    pull (puller.py) → claim → compute_and_write → commit → ack
                               read_prefix, step_done (scheduler.py)

The message is settled once: `ack` when the job is committed or nobody needs it any more, `nak` when
another worker may succeed, `term` when no worker can ever serve it. It is not settled here if
somebody else does that: another worker that holds the job, or the decode worker, which naks the
delivery of a holder whose connection it lost.

asyncio thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

from pullfill.backoff import Backoff
from pullfill.engine import features
from pullfill.errors import (
    BadMessage,
    ClaimRefused,
    ConfigError,
    Fenced,
    HandoffError,
    PeerUnavailable,
    PullfillError,
    QueueUnavailable,
)
from pullfill.net.peer_link import ConnectionLost
from pullfill.prefill_worker.decode_links import DecodeLink
from pullfill.prefill_worker.reach import OutOfReach
from pullfill.prefill_worker.task import PrefillTask, TooLong, check
from pullfill.queue.contract import Delivery
from pullfill.runtime import failpoints, log, metrics, tracing
from pullfill.wire import (
    FenceToken,
    Grant,
    KvMode,
    PrefillJob,
    Progress,
    RefuseReason,
    Revoke,
    decode,
    u32,
)

if TYPE_CHECKING:
    from pullfill.prefill_worker.puller import Puller
    from pullfill.prefill_worker.transfer_worker import TransferWorker

logger = log.get("prefill_worker.handoff")

AGAIN_S = 0.05
"""The least time before the queue delivers a job again whose attempt failed here."""
# Long enough for the registry's watch to show a new incarnation or worker.
_AGAIN_RENEWED_S = 10 * AGAIN_S
_STALE = "stale"  # the decode worker's answer to a commit whose attempt is not the current one
_TRIES_OUT_OF_REACH = 2  # deliveries; after them the decode worker computes the prompt itself
_GRANTED = metrics.CLAIM.labels("granted")


class Revoked(HandoffError):
    """The decode worker took the grant back."""


class Handoff:
    """See the module. `run` may be called once."""

    running: asyncio.Task[None]  # runs `run`. The owner sets it
    job: PrefillJob
    link: DecodeLink  # over which it is claimed, and that brought the grant
    grant: Grant
    # The end of the attempt: None when all KV is written, else what has ended it. There is a new
    # one if the connection was lost and made again while the job was held. If it stays lost,
    # `_unreachable` must see that it was there.
    _done: asyncio.Future[None]

    def __init__(self, puller: Puller, delivery: Delivery) -> None:
        self._puller = puller
        # The delivery that began the run, and the newest one. The queue may deliver a message again
        # while its job runs here. Heartbeats and the settling go to the newest delivery.
        self.first = self.latest = delivery
        self.job_id = delivery.job_id
        # It came past the queue, for a self-check.
        self._trial = not delivery.ack_subject
        # Whether the job was committed. None: it still runs, or others do the rest.
        self.succeeded: bool | None = None
        self.task: PrefillTask | None = None
        self._settled: Delivery | None = None
        self._token_ids: list[int] = []
        self._began = self._asked = self._granted = time.monotonic()
        # Set from the grant until the decode worker is told that the attempt is over.
        self._holds_grant = False
        self._revoked = 0  # the newest attempt that the decode worker has taken back
        # Pull mode: the decode worker's right to read our blocks, until it is revoked.
        self._reads: FenceToken | None = None

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
            # The delay lets our GiveUp reach the decode worker before another claim does.
            await self._settling().nak(AGAIN_S)
            raise
        except Exception:
            self.succeeded = False
            self._give_up("failed", retry=True)
            logger.exception("job %s failed; its message gets a nak", self.job_id)
            await self._settling().nak()
        finally:
            if hasattr(self, "link"):
                self.link.jobs.pop(self.job_id, None)
            self._send_spans()

    async def _steps(self) -> None:
        self._read_message()
        too_long = len(self._token_ids) > self._puller.links.hello.max_prompt_tokens
        # Another worker may take it. The last delivery is claimed all the same, so that the decode
        # worker learns at once.
        if too_long and not self._trial and not self._last_delivery:
            return await self._leave_to_others()
        await self.claim()
        await self._check_grant()
        try:
            task = await self.compute_and_write()
            await self.commit(task)
        finally:
            self._end_task()

    # ------------------------------------------------------------------ step 5: claim

    async def claim(self) -> None:
        """Ask the decode worker for a grant. Raises ClaimRefused, PeerUnavailable.

        If the job's blocks are held, ask again later."""
        job, budget = self.job, self._puller.budget
        failpoints.hit("prefill.before_claim")
        loop = asyncio.get_running_loop()
        self._done = loop.create_future()
        if not self._puller.links.is_up(job.decode_instance):
            budget.counts_no_more(self.job_id)
        self.link = await self._puller.links.find(job.decode_instance, trial=self._trial)
        self.link.jobs[self.job_id] = self
        asked = time.monotonic()
        while True:
            if self._done.done() and self.link.connected:  # it was lost, and made again
                self._done = loop.create_future()
            try:
                grant = await self.link.claim(self.job_id, job.incarnation, self.first.ack_subject)
                break
            except ClaimRefused as exc:
                wait_s = exc.retry_after_s
                if exc.reason != RefuseReason.HELD.value or wait_s is None:
                    raise
                if time.monotonic() + wait_s > asked + job.timeout_s:
                    raise
                if job.features:  # its turn comes once the inputs of other jobs are sent
                    budget.counts(self.job_id)
                else:
                    budget.counts_no_more(self.job_id)
                await asyncio.sleep(wait_s)
        budget.granted(self.job_id, grant.due_s)
        self.grant, self._holds_grant = grant, True
        if self._revoked >= grant.attempt:
            self._fail(Revoked("revoked before it began"))
        self._asked, self._granted = asked, time.monotonic()
        _GRANTED.inc()
        failpoints.hit("prefill.after_claim")
        log.about(attempt=grant.attempt)

    # ------------------------------------------------------------------ step 7: compute_and_write

    async def compute_and_write(self) -> PrefillTask:
        """Have the engine compute the prompt. Wait until all its KV is written (pull mode: kept).

        The engine reads the prefix first (`PrefillScheduler.read_prefix`). After each step it hands
        the blocks that are whole to the transfer worker (`PrefillScheduler.step_done`).
        Raises what ends the attempt before that, for example TimeoutError at its deadline."""
        link, engine = self.link, self._puller.engine
        until = asyncio.get_running_loop().time() + self.grant.deadline_s
        transfer_worker = link.transfer.current or await self._reach_memory(until)
        self._check_alive()
        if self.job.adapter is not None:
            await engine.check_adapter(self.job.adapter)
            self._check_alive()
        self.task = task = PrefillTask(
            self.job, self.grant, self._token_ids, self._puller.links.compat.block_size,
            transfer_worker, self._on_done, self._on_computed,
        )  # fmt: skip
        engine.submit(task)
        await self._until_written(task, until)
        return task

    async def _reach_memory(self, until: float) -> TransferWorker:
        """Connect to the decode worker's KV memory, until the attempt ends or its deadline."""
        attempt = self.link.transfer.connecting()
        left_s = until - asyncio.get_running_loop().time()
        ends: set[asyncio.Future[Any]] = {attempt, self._done}
        await asyncio.wait(ends, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        self._check_alive()
        if not attempt.done():
            raise TimeoutError
        return attempt.result()

    async def _until_written(self, task: PrefillTask, until: float) -> None:
        """Wait until all KV is written. Raises what ends the task, or TimeoutError.

        until: the deadline. It moves while the attempt makes progress, which the decode worker is
        told."""
        # The deadline of a grant is an estimate: the link may not be measured yet, or may have
        # become slower. An attempt that makes progress must not lose its work to a wrong estimate.
        loop, deadline_s = asyncio.get_running_loop(), self.grant.deadline_s
        computed = moved = blocks = 0
        write_s = 0.0
        while True:
            pause_s = min(1.0, deadline_s / 4, until - loop.time())
            await asyncio.wait([self._done], timeout=max(0.0, pause_s))
            if self._done.done():
                return self._done.result()
            last_computed, computed = computed, task.scheduled
            last_moved, moved = moved, task.transfer_worker.moved_bytes
            # Copies for other jobs count, too, while this one waits behind them.
            if computed > last_computed or (task.submitted > 0 and moved > last_moved):
                last_blocks, blocks = blocks, task.written_blocks
                last_s, write_s = write_s, task.seconds("write")
                progress = Progress(
                    job_id=self.job_id,
                    attempt=task.attempt,
                    incarnation=self.grant.incarnation,
                    blocks=max(0, blocks - last_blocks),  # a preempted prompt is written again
                    write_s=max(0.0, write_s - last_s),
                )
                self.link.send(progress)
                until = loop.time() + max(deadline_s, self.job.timeout_s)
            elif loop.time() >= until:
                raise TimeoutError

    # ------------------------------------------------------------------ step 8: commit

    async def commit(self, task: PrefillTask) -> None:
        """Tell the decode worker that all blocks are written, or kept in pull mode. Then ack."""
        failpoints.hit("prefill.before_commit")
        within_s = 10.0
        if task.mode is KvMode.PULL:
            blocks = task.kept_blocks
            self._reads = self._puller.fences.open(blocks, len(blocks))  # to be read only
            within_s = 24 * 3600.0  # a safety net: the decode worker replies when its read ends
        done = task.done((self._granted - self._asked) * 1e3, self._reads)
        reply = await self.link.commit(done, within_s)
        failpoints.hit("prefill.before_ack")
        self.succeeded = reply.ok
        if not reply.ok:
            logger.warning("commit of job %s refused: %s", self.job_id, reply.reason)
        if reply.reason != _STALE:  # if stale, another worker may have the message
            await self._settling().ack()

    # ------------------------------------------------------------------ parts of the steps

    def _read_message(self) -> None:
        """Decode the job. Raises BadMessage."""
        self.job = decode(self.first.body, PrefillJob)
        self._token_ids = u32.unpack(self.job.token_ids)
        if not self._token_ids or self.job.job_id != self.job_id:
            raise BadMessage("no tokens, or the job id is not the message's")
        log.about(request_id=self.job.request_id, decode_instance=self.job.decode_instance)

    @property
    def _last_delivery(self) -> bool:
        """Whether the queue delivers the job no more."""
        return self.first.number >= self._puller.consumer.max_deliver

    async def _leave_to_others(self) -> None:
        """Give a job back that was not claimed. Its next delivery comes later each time."""
        logger.info(
            "job %s: a prompt of %d tokens is longer than this worker takes (%d); left to others",
            self.job_id, len(self._token_ids), self._puller.links.hello.max_prompt_tokens,
        )  # fmt: skip
        delay_s = _AGAIN_RENEWED_S * (self.first.number - 1) or AGAIN_S
        self._puller.leave_to_others(delay_s)
        await self._settling().nak(delay_s)

    async def _check_grant(self) -> None:
        """Check that the job is the one that was granted, and that it fits here.

        If it is not, give up for good, and raise BadMessage or TooLong."""
        links, groups = self._puller.links, self._puller.engine.groups
        try:
            brought = ""
            if self.grant.features:  # on a thread: 8 MiB take 10 ms
                brought = await asyncio.to_thread(features.digest, self.grant.features)
            check(
                self.job, self.first.body, self._token_ids, self.grant, brought, links.hello,
                block_size=links.compat.block_size, groups=groups,
            )  # fmt: skip
        except Exception as exc:
            self._give_up(str(exc), retry=False)
            raise

    def _check_alive(self) -> None:
        """Raise what has ended the attempt before it had a task."""
        if self._done.done():
            self._done.result()

    def _on_computed(self) -> None:
        """The prompt is computed. Engine thread."""
        if self._puller.budget.by_prompt:
            call = self._done.get_loop().call_soon_threadsafe
            call(self._puller.budget.counts_no_more, self.job_id)

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
            self._done.exception()  # or asyncio complains if nobody waits for it any more

    def _end_task(self) -> None:
        if (task := self.task) is None:
            return
        task.cancel()
        self._puller.engine.end(task)
        if task.mode is KvMode.PULL:
            self._puller.keep(self._let_go(task))

    async def _let_go(self, task: PrefillTask) -> None:
        """Pull mode: let the engine free the blocks, once it is proved that nobody reads them."""
        # A decode worker that is stopped during a read keeps them, and one that is dead does not.
        pauses = Backoff(0.002, 0.05)
        try:
            while not self._revoke_reads():  # noqa: ASYNC110 (only asking tells)
                await asyncio.sleep(pauses.next())
        except ConfigError as exc:
            logger.debug("job %s keeps its blocks: %s", self.job_id, exc)  # we are leaving
            return
        task.transfer_worker.let_go(task)

    def _revoke_reads(self) -> bool:
        """End a read of our blocks soon. Returns whether it is proved that nobody reads them."""
        return self._reads is None or self._puller.fences.try_revoke(self._reads)

    # ------------------------------------------------------------------ what ends it early

    def revoke(self, revoke: Revoke) -> None:
        """Stop an attempt that the decode worker revokes. Its fence proves when that is quiet."""
        # It may come before the grant was even looked at.
        self._revoked = max(self._revoked, revoke.attempt)
        if self._holds_grant and revoke.attempt == self.grant.attempt:
            self._fail(Revoked(f"revoked: {revoke.reason}"))
            self._revoke_reads()

    def link_lost(self) -> None:
        """End the attempt: the connection is lost over which it was granted, or is claimed."""
        self._fail(ConnectionLost(f"lost decode worker {self.link.name}"))

    def _fail(self, why: PullfillError) -> None:
        """End the attempt before its time."""
        if isinstance(why, Revoked):
            metrics.STALE_REFUSED.labels("revoked").inc()
        if self.task is not None:
            self.task.end(why)
        else:
            self._resume(why)

    async def _not_begun(self, why: PullfillError | TimeoutError) -> None:
        """Settle a job that this worker did not begin, or leave that to its holder."""
        match why:
            case BadMessage():
                self.succeeded = False
                logger.error("job %s is poison, dead-lettered: %s", self.job_id, why)
                try:
                    await self._settling().term(str(why))
                except QueueUnavailable as exc:  # the queue delivers the message again
                    logger.warning("job %s is no dead letter yet: %s", self.job_id, exc)
            case TooLong():
                self.succeeded = False
                logger.warning("job %s attempt %d: %s", self.job_id, self.grant.attempt, why)
                await self._settling().ack()
            case ClaimRefused():
                metrics.CLAIM.labels(why.reason).inc()
                # The worker that holds a job in progress keeps its message alive and settles it.
                # But the last delivery is acked here: or it would become a dead letter.
                if why.reason != RefuseReason.IN_PROGRESS or self._last_delivery:
                    await self._settling().ack()
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
        retry = not isinstance(why, OutOfReach) or self.first.number < _TRIES_OUT_OF_REACH
        if not isinstance(why, ConnectionLost):
            self._give_up(str(why) or "timeout", retry=retry)
        match why:
            case ConnectionLost():
                logger.info("job %s: %s; the decode worker naks it", self.job_id, why)
            case Revoked() | Fenced():
                # Do not settle the message: it was deleted, or another worker has a newer delivery.
                logger.info("job %s attempt %d: %s", self.job_id, attempt, why)
            case OutOfReach() if retry:
                self._puller.leave_to_others(_AGAIN_RENEWED_S)
                await self._settling().nak(_AGAIN_RENEWED_S)
            case OutOfReach():
                logger.warning("job %s attempt %d: %s", self.job_id, attempt, why)
                await self._settling().ack()
            case _:
                logger.warning("job %s attempt %d: %s", self.job_id, attempt, why or "timeout")
                await self._settling().nak(AGAIN_S)

    async def _unreachable(self, why: PeerUnavailable) -> None:
        """Settle a job whose decode worker cannot be reached.

        It must stay in the queue, and be no dead letter, until the decode worker deletes it."""
        job, number = self.job, self.first.number
        delay_s = patience(job.timeout_s, number, self._puller.consumer.max_deliver)
        # The connection may have broken under our claim. Then it may drain, connected to others.
        if self._done.done() or self._puller.links.knows(job.decode_instance):
            self._puller.leave_to_others(delay_s or 0.0)
        elif delay_s is not None:
            # It may be gone. Or it is not listed yet, or it drains. So others get the first chance.
            delay_s = max(delay_s, _AGAIN_RENEWED_S) if number == 1 else None
        logger.info("job %s: %s%s", self.job_id, why, "" if delay_s else "; dropped")
        newest = self._settling()
        await (newest.nak(delay_s) if delay_s else newest.ack())

    def _give_up(self, cause: str, *, retry: bool) -> None:
        """Tell the decode worker that the attempt is over here. Once, and only with a grant."""
        if self._holds_grant:
            self._holds_grant = False  # so a late revoke finds nothing
            self.link.give_up(self.grant, cause, retry=retry)

    # ------------------------------------------------------------------ the message in the queue

    @property
    def left_over(self) -> Delivery | None:
        """After the run: a newer delivery, which the run did not settle. It must run next.

        A run that settled nothing leaves its own delivery to somebody else."""
        return None if self.latest is (self._settled or self.first) else self.latest

    async def heartbeat(self) -> None:
        """Keep the queue from giving the job to another worker."""
        with contextlib.suppress(failpoints.FailpointError):
            failpoints.hit("prefill.heartbeat")
            await self.latest.in_progress()

    def _settling(self) -> Delivery:
        """Return the newest delivery, which is settled now."""
        self._settled = self.latest
        return self.latest

    def _send_spans(self) -> None:
        """Send the spans of this delivery, once the job is over here.

        prefill.attempt     from the delivery until the message is settled
          prefill.claim     from the claim to the grant
          prefill.compute   from the first step to the last
          transfer.read     each read of the prefix
          transfer.write    each write of finished blocks

        A second attempt is linked to the first, wherever that one ran. A delivery that gets no
        grant makes no attempt: it has a random span of the same name."""
        job = getattr(self, "job", None)
        if job is None or (remote := tracing.read(job.trace)) is None:
            return
        number = self.grant.attempt if hasattr(self, "grant") else 0
        span = remote.attempt(self.job_id, number) if number else remote.child()
        told = {
            "pullfill.job_id": self.job_id,
            "pullfill.attempt": number,
            "pullfill.delivery": self.first.number,
            "pullfill.decode_instance": job.decode_instance,
            "gen_ai.request.id": job.request_id,
        }
        links = (remote.attempt(self.job_id, number - 1),) if number > 1 else ()
        error = "" if self.succeeded else "not committed here"
        now, send = time.monotonic(), tracing.record
        send(
            "prefill.attempt", span, remote, self._began, now, told,
            links=links, error=error, kind="CONSUMER",
        )  # fmt: skip
        if number:
            send("prefill.claim", span.child(), span, self._asked, self._granted, {}, kind="CLIENT")
        if (task := self.task) is None:
            return
        if task.first_step:
            failure = "" if task.failure is None else str(task.failure) or repr(task.failure)
            tokens = {"gen_ai.usage.prompt_tokens": len(task.token_ids)}
            began, ended = task.first_step, task.last_compute or now
            send("prefill.compute", span.child(), span, began, ended, tokens, error=failure)
        transport = task.transfer_worker.transport
        for verb, nbytes, began, ended in task.moves:
            about = {"pullfill.transport": transport, "pullfill.bytes": nbytes}
            send(f"transfer.{verb}", span.child(), span, began, ended, about)


def patience(timeout_s: float, delivery: int, max_deliver: int) -> float | None:
    """Return how long the queue must hold back a job whose decode worker cannot be reached.

    The first time is short: another worker may reach it. The last one is the job's `timeout_s`,
    after which the decode worker has given the job up. Then None: nobody needs the job, so settle
    it. The age of the job is not used, because it depends on NATS's clock, which may be set.

    delivery: the number of this delivery, from 1."""
    if delivery >= max_deliver:
        return None
    if delivery == 1 < max_deliver - 1:
        return AGAIN_S
    share = 4 ** (max_deliver - 1 - delivery)
    return max(_AGAIN_RENEWED_S, timeout_s / float(share))
