"""Pulls jobs while there is room for them, and runs a `Handoff` for each.

A prompt that fills the budget stops the pulling: a worker that is free sooner may take the next
job. `Budget` says what counts against the budget. While a decode worker has no KV credit left
(`Credits`), nothing is pulled either, because the next job may be of that decode worker.

asyncio thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pullfill.backoff import Backoff
from pullfill.errors import BadMessage, ClaimRefused, PullfillError
from pullfill.prefill_worker.handoff import Handoff
from pullfill.prefill_worker.transfer_worker import Credits
from pullfill.queue.contract import Delivery
from pullfill.queue.jetstream import PULLS, JetStreamConsumer
from pullfill.runtime import log
from pullfill.runtime.health import CONNECTION
from pullfill.runtime.lifecycle import Tasks, end
from pullfill.snapshot import FLOWS, HeldJob
from pullfill.transfer.shm.fence import ShmFences
from pullfill.wire import SILENT_S, PrefillJob, RefuseReason, decode, u32

if TYPE_CHECKING:
    from pullfill.prefill_worker.decode_links import DecodeLinks
    from pullfill.prefill_worker.engine import PrefillEngine

logger = log.get("prefill_worker.puller")

MAX_WAITING = 64
"""Stop pulling at this many deliveries without a grant."""
WAIT_S = 2.0
"""Longest wait for a job, or for room."""
# How often this worker asks whether a job is there that it would take from nobody who waits for it.
_LOOK_S = WAIT_S / 40


def budget_of(step_tokens: int) -> int:
    """Return the budget of the puller, in prompt tokens.

    Two steps' worth: while one prompt is written, the next is computed. It is not larger, so that
    other workers get the rest. But at least 4096, because small steps do not make prompts shorter.

    step_tokens: most tokens in a step."""
    return max(4096, 2 * step_tokens)


@dataclass(slots=True)
class _Charge:
    tokens: int
    timer: asyncio.TimerHandle
    counted: bool = True
    granted: bool = False


class Budget:
    """Which deliveries count against this worker's budget, and how many only wait.

    A job counts from its grant to its end. While its claim is under way a delivery counts for
    `claim_s` at most. A delivery whose claim gets no answer does not count, nor does one that waits
    for a connection. A job that is late counts no more: those behind it may still be in time, and
    the engine computes them first.

    With `--concurrency N` prompts count instead of tokens, N + 1 of them, and those only until they
    are computed. KV that still travels counts only against the KV credits.

    limit: tokens, or prompts. most: jobs, instead of the limit. None: the limit.
    room: set when something counts no more. The puller clears it."""

    def __init__(self, tokens: int, concurrency: int = 0, *, claim_s: float = 0.05) -> None:
        self.by_prompt = concurrency > 0
        # One prompt more than the engine computes is there, and its prefix is read meanwhile.
        self.limit = concurrency + 1 if concurrency else tokens
        self._claim_s = claim_s
        self._charges: dict[str, _Charge] = {}
        self.most: int | None = None
        self.room = asyncio.Event()
        self.completed = 0
        self.failed = 0

    @property
    def free(self) -> int:
        """How much is left. Negative: more is under way."""
        if self.most is not None:
            return self.most - sum(c.counted or c.granted for c in self._charges.values())
        prompts = sum(charge.counted for charge in self._charges.values())
        return self.limit - (prompts if self.by_prompt else self.tokens)

    @property
    def tokens(self) -> int:
        """Sum over the deliveries that count."""
        return sum(charge.tokens for charge in self._charges.values() if charge.counted)

    @property
    def waiting(self) -> int:
        """Number of deliveries without a grant."""
        return sum(not charge.granted for charge in self._charges.values())

    def pulled(self, job_id: str, tokens: int) -> None:
        """Charge a delivery."""
        # Usually the claim is answered before the timer fires. Without this charge the puller would
        # pull the next jobs before it knows that this one fills the budget, and other workers would
        # get none.
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._claim_s, self.counts_no_more, job_id)
        self._charges[job_id] = _Charge(tokens, timer)

    def granted(self, job_id: str, due_s: float | None = None) -> None:
        """due_s: in how many seconds the job is late. None: never."""
        charge = self._charges[job_id]
        charge.granted = True
        self.counts(job_id)
        if due_s is not None:
            loop = asyncio.get_running_loop()
            charge.timer = loop.call_later(max(0.0, due_s), self.counts_no_more, job_id)
        self.room.set()  # one less waits

    def counts(self, job_id: str) -> None:
        """Note that the job is granted, or will be without another claim."""
        charge = self._charges[job_id]
        charge.timer.cancel()
        charge.counted = True

    def counts_no_more(self, job_id: str) -> None:
        """Stop counting a job: its claim has no answer or cannot be made yet, or the job is late.
        With `--concurrency` also a job that is computed."""
        if (charge := self._charges.get(job_id)) is not None:
            charge.counted = False
            self.room.set()

    def over(self, job_id: str, succeeded: bool | None) -> None:
        """Charge the job no more. succeeded: None: others do the rest."""
        self._charges.pop(job_id).timer.cancel()
        self.room.set()
        if succeeded is not None:
            self.completed += succeeded
            self.failed += not succeeded


@dataclass(eq=False, repr=False)
class Puller:
    """See the module. Its public attributes are what the handoffs share."""

    consumer: JetStreamConsumer
    links: DecodeLinks
    engine: PrefillEngine
    budget: Budget
    credits: Credits
    # Over our own memory. Decode workers read it in pull mode, under one of these only. They say
    # their mode with a grant, so the memory is always open.
    fences: ShmFences
    max_jobs: int = 32  # with a grant, at most
    patience_s: float = SILENT_S  # how long a decode worker without KV credit keeps all waiting
    # Takes a delivery whose job this process has asked for itself. Returns False for any other.
    # Raises ClaimRefused if another prefill worker has the job.
    take_back: Callable[[Delivery], bool] = lambda _: False

    def __post_init__(self) -> None:
        self._nats = self.consumer.health
        self._jobs: dict[str, Handoff] = {}
        self._kept = Tasks()
        self._tasks: list[asyncio.Task[None]] = []
        self._beats: asyncio.Task[None] | None = None
        self._pulling: asyncio.Timeout | None = None
        self._stopped = False
        self._pauses = Backoff()
        self._leave_until = -math.inf
        self._whys = dict.fromkeys(("engine", "busy", "check"), "")
        self._told = ""
        self.no_jobs = asyncio.Event()  # set while no job runs
        self.idle = asyncio.Event()  # set while nothing that `keep` runs goes on either
        self._look_if_idle()
        self._unsubscribe = self._nats.subscribe(self._tell)

    def start(self) -> None:
        """Begin to pull, and to run the jobs of self-checks that decode workers send."""
        self._tell()
        self._beats = asyncio.create_task(self._send_heartbeats())
        self._tasks = [asyncio.create_task(self._pull_all()), asyncio.create_task(self._trials())]

    async def stop(self) -> None:
        """Stop pulling for good. Jobs under way go on."""
        self._stopped = True  # nats-py may lose the cancellation if an answer comes with it
        await end(*self._tasks)
        await self.consumer.drain()

    async def abandon(self) -> None:
        """Stop now. Give every attempt up, and nak its message."""
        # What `keep` runs goes on: the engine may stay, and must get its blocks back.
        while jobs := list(self._jobs.values()):
            await end(*(job.running for job in jobs))
            for job in jobs:
                if self._jobs.get(job.job_id) is job:
                    self._ended(job)  # it was cancelled before it began

    async def close(self) -> None:
        self._unsubscribe()  # the connection to NATS will be closed
        await self.stop()
        await self.abandon()
        await end(self._beats)

    @property
    def in_flight(self) -> int:
        """Jobs that run here."""
        return len(self._jobs)

    def held(self) -> list[HeldJob]:
        """Return the jobs that run here, for the live page. Only when somebody looks."""
        now = time.monotonic()
        return [
            HeldJob(job_id=job.job_id, computed=task.computed, kv_s=task.computed_for(now))
            if (task := job.task) is not None
            else HeldJob(job_id=job.job_id)
            for job in list(self._jobs.values())[:FLOWS]
        ]

    # ------------------------------------------------------------------ why nothing is pulled

    def pause(self, what: Literal["engine", "busy", "check"], why: str) -> None:
        """Note why no job is pulled. Empty: this is no reason any more.

        what: the engine takes no steps, other work of this worker goes first, or no decode worker
        gets our KV before a self-check has passed. Of the last one each decode worker is told its
        own reason (`DecodeLinks.why_none_of`)."""
        before, self._whys[what] = self._whys[what], why
        if why == before:
            return
        if what == "check" and bool(why) != bool(before):
            logger.info("%s", f"pulling no jobs: {why}" if why else "the self-check has passed")
        if self.paused:
            # A job that it brought would get a nak, and use up one of its `max_deliver` deliveries.
            self._end_pull()
        self.budget.room.set()
        self._tell()

    @property
    def paused(self) -> bool:
        return any(self._whys.values())

    def _tell(self) -> None:
        """Tell decode workers why nothing is pulled, if that has changed."""
        # At once, and not by the next Heartbeat: else they would queue jobs that nobody takes.
        why = self._whys["engine"]
        # A decode side beside us may get no answer for a moment. That says nothing about pulls. And
        # where no prefill worker pulls, decode workers take back all jobs that wait.
        if error := self._nats.error(CONNECTION, PULLS):
            why = why or f"NATS does not answer it: {error}"
        why = why or self._whys["busy"]
        if why == self._told:
            return
        self._told = why
        if why and why == self._whys["busy"]:
            logger.debug("pulling no jobs: %s", why)
        elif why:
            logger.warning("pulling no jobs: %s", why)
        else:
            logger.info("pulling jobs again")
            self.budget.room.set()
        self.links.pause(why)

    def leave_to_others(self, again_s: float) -> None:
        """Take only jobs that no idle worker waits for, until the queue delivers one again.

        Called for a job that this worker cannot serve: it cannot bring KV to its decode worker, or
        not that of a prompt so long. Other prefill workers may be able to.

        again_s: in how many seconds the queue delivers that job."""
        # Until then this worker does not wait at the queue, it only asks for a job that is there. A
        # new job goes to a worker that waits. If none waits, this worker takes it, because it may
        # be of a decode worker that this one reaches.
        now = asyncio.get_running_loop().time()
        if now >= self._leave_until:
            self._end_pull()
        # Some looks longer, so that others have time to take it.
        self._leave_until = max(self._leave_until, now + again_s + 5 * _LOOK_S)

    def spare(self, most: int | None) -> None:
        """Take so many jobs at a time, because each delays streams of this worker, and none that
        an idle worker waits for. None: they delay none."""
        if most == self.budget.most:
            return
        self.budget.most = most
        self._end_pull()
        self.budget.room.set()

    def _end_pull(self) -> None:
        if self._pulling is not None and not self._pulling.expired():
            self._pulling.reschedule(asyncio.get_running_loop().time())

    async def _wait_for_room(self, at_most_s: float) -> None:
        self.budget.room.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                await self.budget.room.wait()

    async def _wait_for_credits(self) -> None:
        """Wait until every decode worker has credit, `patience_s` at most."""
        if not (gone := self.credits.gone):
            return
        logger.info("pulling nothing: no KV credits left for %s", ", ".join(gone))
        # Then there is one more pull all the same. So a slow decode worker delays the jobs of
        # others each time, and a stopped one only once: its connection ends after that time of
        # silence, which writes its credits off.
        loop = asyncio.get_running_loop()
        until = loop.time() + self.patience_s
        while self.credits.gone and (left := until - loop.time()) > 0:
            await self._wait_for_room(left)

    # ------------------------------------------------------------------ step 5: pull

    async def _pull_all(self) -> None:
        while not self._stopped:
            await self.pull()

    async def pull(self) -> None:
        """Pull one job and start it. If there is no room for it, or no job, wait for a while."""
        await self._wait_for_credits()
        waiting, free = self.budget.waiting, self.budget.free
        full = len(self._jobs) - waiting >= self.max_jobs or waiting >= MAX_WAITING
        if self.paused or full or free <= 0:
            await self._wait_for_room(WAIT_S)
            return
        leaves = (
            self.budget.most is not None or asyncio.get_running_loop().time() < self._leave_until
        )
        pulling = self._pulling = asyncio.timeout(None)
        # A worker with room waits for a job, and so gets it before one that only asks.
        wait_s = 0.0 if leaves else WAIT_S
        try:
            try:
                async with pulling:
                    delivery = await self.consumer.pull(wait_s)
            finally:
                self._pulling = None
        except Exception as exc:
            if pulling.expired():
                return  # `_end_pull` has ended it
            level = logger.debug if isinstance(exc, PullfillError) else logger.exception
            level("no jobs now: %s", exc)
            await self._wait_for_room(self._pauses.next())
            return
        self._pauses.reset()
        if delivery is None:
            if leaves:
                await asyncio.sleep(_LOOK_S)
        elif self.paused:
            await delivery.nak()
        else:
            self.begin(delivery)

    # ------------------------------------------------------------------ the jobs that run

    def begin(self, delivery: Delivery) -> None:
        """Run a delivery. If its job runs here already, that run settles this newer one."""
        if (job := self._jobs.get(delivery.job_id)) is not None:
            job.latest = delivery
            return
        if self._is_own(delivery):
            return
        job = self._jobs[delivery.job_id] = Handoff(self, delivery)
        self.budget.pulled(delivery.job_id, delivery.tokens)
        self.no_jobs.clear()
        self.idle.clear()
        job.running = asyncio.create_task(self._run(job))

    async def _run(self, job: Handoff) -> None:
        log.about(job_id=job.job_id)
        try:
            await job.run()
        finally:
            self._ended(job)  # here, because a done callback would cost a turn of the loop

    def _ended(self, job: Handoff) -> None:
        del self._jobs[job.job_id]
        self.budget.over(job.job_id, job.succeeded)
        if (newer := job.left_over) is not None:
            self.begin(newer)
        self._look_if_idle()

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what may go on after its job, until this worker is idle."""
        self.idle.clear()
        task = self._kept.begin(work, "what goes on after a job")
        task.add_done_callback(lambda _: self._look_if_idle())

    def _look_if_idle(self) -> None:
        if not self._jobs:
            self.no_jobs.set()
            if not self._kept:
                self.idle.set()

    def _is_own(self, delivery: Delivery) -> bool:
        """Whether this process has asked for the job itself. Then its message is cared for here."""
        last = delivery.number >= self.consumer.max_deliver  # or it would become a dead letter
        try:
            if not self.take_back(delivery):
                return False
        except ClaimRefused as exc:
            if not last:
                if exc.reason == RefuseReason.HELD:
                    # No worker has it. Ask again, ever later: its last writer is soon quiet.
                    self.keep(delivery.nak(_LOOK_S * 4**delivery.number))
                return True  # else the worker that has the job settles it
        self.keep(delivery.ack())
        return True

    async def _trials(self) -> None:
        while True:
            body = (await self.links.trials.get()).job
            try:
                job = decode(body, PrefillJob)
                delivery = Delivery(job.job_id, body, len(u32.unpack(job.token_ids)))
                self.begin(delivery)
            except BadMessage as exc:
                logger.warning("the job of a self-check cannot be read: %s", exc)

    async def _send_heartbeats(self) -> None:
        """Keep the queue from giving the jobs that run here to other workers."""
        while True:
            # A job that starts meanwhile gets its first heartbeat early.
            await asyncio.sleep(self.consumer.ack_wait_s / 3)
            for job in list(self._jobs.values()):
                try:
                    await job.heartbeat()
                except Exception:  # without this task the queue would give away all other jobs
                    logger.exception("could not tell the queue that job %s runs", job.job_id)
