"""How one attempt ends on this worker: why, who is told, and who is waiting for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pullfill.errors import HandoffError, PeerUnavailable, PullfillError
from pullfill.prefill_worker.control_connection import ConnectionLost, ControlConnection
from pullfill.prefill_worker.task import PrefillTask
from pullfill.runtime.waits import Prompt
from pullfill.wire import DrainAck, GiveUp, Grant

T = TypeVar("T")

AGAIN_S = 0.05
"""The least time before the queue delivers a job again whose attempt failed here."""
_NAK_SOONEST_S = 0.5
_QUIET_S = 30.0
"""How long a drain waits for a revoked copy to end."""


class Renewed(PeerUnavailable):
    """The decode worker has a new incarnation, but our connection was made to the old one."""


class TooLong(HandoffError):
    """This worker's context is shorter than the decode worker's."""


class Revoked(HandoffError):
    """The decode worker took the grant back."""


@dataclass(slots=True)
class Opening:
    """A job from its claim until its task is there: what would have ended the task is kept here,
    because it may come before the grant was even looked at."""

    decode_instance: str
    revoked: set[int] = field(default_factory=set)
    lost: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def revoke(self, attempt: int) -> None:
        self.revoked.add(attempt)
        self.changed.set()

    def lose(self) -> None:
        self.lost = True
        self.changed.set()

    def check(self, attempt: int) -> None:
        """Raise Revoked or ConnectionLost if the attempt ended before it began."""
        if attempt in self.revoked:
            raise Revoked("revoked before it began")
        if self.lost:
            raise ConnectionLost(f"lost decode worker {self.decode_instance}")

    async def unless_over(self, attempt: int, work: Coroutine[Any, Any, T]) -> T:
        """What `work` brings, cancelled and as `check` if the attempt ends before it is there."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._worked)
        try:
            while not task.done():
                self.check(attempt)
                self.changed.clear()
                await self.changed.wait()
            self.check(attempt)
            return task.result()
        finally:
            task.cancel()

    def _worked(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            task.exception()  # seen, also when nobody asks for the result any more
        self.changed.set()


def again_s(failure: BaseException) -> float:
    """Return the seconds after which the queue delivers a job again whose attempt failed here.

    After Renewed that is long enough for the registry's watch to show the new incarnation."""
    return 0.5 if isinstance(failure, Renewed) else AGAIN_S


def patience(timeout_s: float, delivery: int, max_deliver: int) -> float | None:
    """Return how long the queue must hold back a job whose decode worker cannot be reached.

    The first times are short: another worker may reach it. The last one is the job's `timeout_s`,
    after which the decode worker has given the job up. Then None: nobody needs the job, so settle
    it. The age of the job is not used, because it depends on NATS's clock, which may be set.
    """
    if delivery >= max_deliver:
        return None
    share = 4 ** (max_deliver - 1 - delivery)
    return max(_NAK_SOONEST_S, timeout_s / float(share))


class GiveUpOnce:
    """Tells the decode worker, at most once, that the attempt is over here."""

    def __init__(self, link: ControlConnection, grant: Grant) -> None:
        self._link = link
        self._grant: Grant | None = grant

    def __call__(self, cause: str, *, retry: bool) -> None:
        grant, self._grant = self._grant, None
        if grant is not None:
            self._link.send(
                GiveUp(
                    job_id=grant.job_id,
                    attempt=grant.attempt,
                    incarnation=grant.incarnation,
                    cause=cause[:500],
                    retry=retry,
                )
            )


async def tell_quiet(link: ControlConnection, task: PrefillTask, incarnation: str) -> None:
    """Answer a revoke as soon as no copy of the task runs.

    No thread waits for that, because there may be as many revokes as jobs."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    task.when_quiet(lambda: loop.call_soon_threadsafe(over.set_result, None))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_QUIET_S):
            await asyncio.shield(over)
            link.send(DrainAck(job_id=task.job_id, attempt=task.attempt, incarnation=incarnation))


class Calls:
    """Runs calls on the loop it was made on, for other threads. Those that come before the loop
    got to the last ones do not wake it again."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: deque[Callable[[], object]] = deque()
        self._woken = False

    def soon(self, call: Callable[[], object]) -> None:
        """From any thread; returns at once. `call` must not raise."""
        self._calls.append(call)
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._woken = False  # first: what comes from now on wakes the loop again
        while self._calls:
            self._calls.popleft()()


def resolver(done: Prompt[None], calls: Calls) -> Callable[[BaseException | None], None]:
    """Resolves `done` from any thread."""

    def resolve(failure: BaseException | None) -> None:
        def set_it() -> None:
            if done.done():
                return
            if failure is None:
                done.set_result(None)
            elif isinstance(failure, PullfillError):
                done.set_exception(failure)
            else:
                done.set_exception(HandoffError(repr(failure)))

        calls.soon(set_it)

    return resolve
