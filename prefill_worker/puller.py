"""Pulls jobs while there is budget, in prompt tokens.

The budget is large enough that the engine has the next prompt while the blocks of the last one are
written. It is not larger, so that other workers get the rest. A prompt that fills the budget stops
the pulling: a worker that is free sooner may take the next job. Jobs count from their grant
(budget.py). The number of deliveries without a grant is limited, too.

With `--concurrency N` the budget is N + 1 prompts that are not computed yet, of any length. So one
prompt more than the engine computes is there, and its prefix is read meanwhile (turns.py). KV that
still travels counts only against the KV credits below.

A tight job (queue/contract.py) may exceed the budget, up to twice the budget, if the engine has a
second prompt: it goes past that one in the engine. Otherwise nothing is gained, and another worker
may be free sooner. A worker without room only asks every _LOOK_S whether one is there: a worker
with room waits for it, and gets it first.

After a job that this worker cannot serve, it leaves jobs to idle prefill workers until _LEAVE_S
after the queue has delivered that job again. Until then it does not wait at the queue. It only asks
every _LOOK_S for a job that is there. A new job goes to a worker that waits. If none waits, this
worker takes it, because it may be of a decode worker that this one reaches.

While a decode worker has no KV credit left (`Credits`), nothing is pulled, because the next job may
be of that decode worker. After `patience_s` there is one more pull all the same. So a slow
decode worker delays the jobs of others by `patience_s` each time. A stopped one does so only once:
its connection ends after that time of silence (decode_links.py). That writes its credits off.
"""

from __future__ import annotations

import asyncio
import contextlib
import math

from pullfill.backoff import Backoff
from pullfill.errors import PullfillError
from pullfill.prefill_worker.jobs import JobRunner
from pullfill.prefill_worker.transfer_worker import Credits
from pullfill.queue.contract import JobConsumer
from pullfill.runtime import log
from pullfill.runtime.lifecycle import end
from pullfill.wire import SILENT_S

logger = log.get("prefill_worker.puller")

MAX_WAITING = 64
"""Stop pulling at this many deliveries without a grant."""
_WAIT_S = 2.0
_LEAVE_S, _LOOK_S = 0.25, 0.05
_LEAST_TOKENS = 4096


def budget_of(step_tokens: int) -> int:
    """Return the budget of the puller.

    Two steps' worth: while one prompt is written, the next is computed. But at least _LEAST_TOKENS,
    because small steps do not make prompts shorter.

    step_tokens: most tokens in a step.
    """
    return max(_LEAST_TOKENS, 2 * step_tokens)


class Puller:
    """Owns the pull loop.

    budget_tokens: prompt tokens under way at which it stops pulling.
    concurrency: prompts that the engine computes in one step, at most. With it, `budget_tokens`
    means nothing. 0: any number."""

    def __init__(
        self,
        consumer: JobConsumer,
        runner: JobRunner,
        *,
        budget_tokens: int,
        max_jobs: int,
        credits: Credits,
        concurrency: int = 0,
        patience_s: float = SILENT_S,
    ) -> None:
        self._consumer = consumer
        self._runner = runner
        self._credits = credits
        self._patience_s = patience_s
        self._by_prompt = concurrency > 0
        self._budget = concurrency + 1 if concurrency else budget_tokens
        self._max_jobs = max_jobs
        self._room = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._paused = False
        self._pulling: asyncio.Timeout | None = None
        self._backoff = Backoff()
        self._leave_until = -math.inf

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def changed(self) -> None:
        """Pull soon: a job has ended, there is credit again, or NATS answers again."""
        self._room.set()

    def pause(self, paused: bool) -> None:
        """Stop or continue pulling. A pull that waits ends now.

        A job that it brought would get a nak, and use up one of its `max_deliver` deliveries."""
        self._paused = paused
        if paused:
            self._end_pull()
        self._room.set()

    def leave_to_others(self, again_s: float = 0.0) -> None:
        """Take only jobs that no other worker waits for, until _LEAVE_S after a job comes again.

        again_s: in how many seconds it does."""
        now = asyncio.get_running_loop().time()
        if now >= self._leave_until:
            self._end_pull()
        self._leave_until = max(self._leave_until, now + again_s + _LEAVE_S)

    def _end_pull(self) -> None:
        if self._pulling is not None and not self._pulling.expired():
            self._pulling.reschedule(asyncio.get_running_loop().time())

    async def stop(self) -> None:
        """Stop pulling for good. Jobs under way go on."""
        await end(self._task)
        self._task = None
        with contextlib.suppress(PullfillError):
            await self._consumer.drain()

    async def _wait_for_credits(self) -> None:
        """Wait until every decode worker has credit, `patience_s` at most."""
        if not (gone := self._credits.gone):
            return
        logger.info("pulling nothing: no KV credits left for %s", ", ".join(gone))
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience_s
        while self._credits.gone and (left := until - loop.time()) > 0:
            await self._wait_for_room(left)

    async def _wait_for_room(self, at_most_s: float) -> None:
        self._room.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                await self._room.wait()

    def _free(self) -> int:
        """Return how much of the budget is left: tokens, or prompts with `--concurrency`."""
        runner = self._runner
        return self._budget - (runner.uncomputed if self._by_prompt else runner.in_flight_tokens)

    def _urgent(self, free: int, jobs: int) -> bool:
        """Whether a tight job may be pulled beyond the budget."""
        return jobs > 1 and free > -self._budget

    async def _run(self) -> None:
        while True:
            await self.pull()

    # ------------------------------------------------------------------ step 5: pull

    async def pull(self) -> None:
        """Pull one job and start it. If there is no room for it, or no job, wait for a while."""
        await self._wait_for_credits()
        waiting = self._runner.waiting
        free = self._free()
        free_jobs = self._max_jobs - (self._runner.in_flight - waiting)
        full = free <= 0
        no_room = full and not self._urgent(free, self._max_jobs - free_jobs)
        if self._paused or no_room or free_jobs <= 0 or waiting >= MAX_WAITING:
            await self._wait_for_room(_WAIT_S)
            return
        now = asyncio.get_running_loop().time()
        leaves = now < self._leave_until
        pulling = self._pulling = asyncio.timeout(None)
        try:
            wait_s = 0.0 if leaves or full else _WAIT_S
            try:
                async with pulling:
                    delivery = await self._consumer.pull(wait_s, urgent_only=full)
            finally:
                self._pulling = None
        except Exception as exc:
            if pulling.expired():
                return  # `_end_pull` has ended it
            level = logger.debug if isinstance(exc, PullfillError) else logger.exception
            level("no jobs now: %s", exc)
            await self._wait_for_room(self._backoff.next())
            return
        self._backoff.reset()
        if delivery is None:
            if full:
                await self._wait_for_room(_LOOK_S)
            elif leaves:
                await asyncio.sleep(_LOOK_S)
        elif not self._paused:
            self._runner.start(delivery)
        else:
            with contextlib.suppress(PullfillError):  # if it fails, the queue delivers it again
                await delivery.nak()
