"""Restarts the processes of `up` that die. A process that dies again and again is given up.

A pidfd tells when a process has ended, so nothing polls. Each start happens under the lock of the
state directory, so `pullfill down` never misses a process.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from pullfill.backoff import Backoff
from pullfill.deploy import disk, plan
from pullfill.deploy.children import Children
from pullfill.deploy.down import SERVERS, remove_shared_memory
from pullfill.deploy.procs import exit_words, tail, wait_exit
from pullfill.deploy.readiness import keep_frontends_off
from pullfill.deploy.state import Locked
from pullfill.errors import PullfillError
from pullfill.options import UpOptions
from pullfill.runtime.lifecycle import STEP_FAILED

MAX_DEATHS = 5
"""A process that dies this often within WINDOW_S is given up."""
WINDOW_S = 60.0
_LOG_LINES = 5
_LOCK_POLL_S = 0.1


class Deaths:
    """The deaths of one process."""

    def __init__(self, first_pause_s: float = 0.5) -> None:
        self._at: deque[float] = deque(maxlen=MAX_DEATHS)
        self._backoff = Backoff(first_pause_s, longest_s=30.0)
        self._ran_from = -math.inf

    def pause(self, now: float, *, blameless: bool = False) -> float | None:
        """Note a death at `now`. Return the seconds to wait before the process is started again.

        Pauses double until the process has run for WINDOW_S. None: give it up.

        blameless: a request may have caused the death. Such deaths alone end in no giving up."""
        if now - self._ran_from > WINDOW_S:
            self._backoff.reset()
        self._ran_from = now
        if not blameless:
            self._at.append(now)
            if len(self._at) == MAX_DEATHS and now - self._at[0] <= WINDOW_S:
                return None
        pause_s = self._backoff.next()
        self._ran_from += pause_s
        return pause_s


class Keeper:
    """Watches the children of one `up`.

    stop: set by a signal. Nothing is started after that.
    first_pause_s: before a process that died is started again."""

    def __init__(
        self,
        options: UpOptions,
        children: Children,
        stop: asyncio.Event,
        cluster_id: str,
        first_pause_s: float = 0.5,
    ) -> None:
        self._options = options
        self._children = children
        self._state = children.state
        self._stop = stop
        self._cluster_id = cluster_id
        self._first_pause_s = first_pause_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ended = asyncio.Event()

    @property
    def watched(self) -> list[str]:
        """The processes that run, or that are started again."""
        return list(self._tasks)

    def watch(self, *names: str) -> None:
        """Keep these processes from now on."""
        for name in names:
            task = asyncio.create_task(self.keep(name))
            self._tasks[name] = task
            task.add_done_callback(partial(self._left, name))

    def _left(self, name: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]
            if not self._tasks:
                self._ended.set()

    async def forget(self, *names: str) -> None:
        """Let these processes end from now on: they are not started again."""
        tasks = [task for name in names if (task := self._tasks.pop(name, None))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def ended(self) -> None:
        """Wait until the last process that was watched has ended by itself."""
        await self._ended.wait()

    def stopped(self) -> bool:
        """Whether the cluster is being stopped, by a signal or by `pullfill down`."""
        return self._stop.is_set() or self.stopped_by_down()

    def stopped_by_down(self) -> bool:
        """Whether `pullfill down` runs, or has run and removed the record of this cluster."""
        launch = self._state.launch()
        gone = launch is None or launch.cluster_id != self._cluster_id
        return gone or self._state.stopping()

    async def keep(self, name: str) -> None:
        """Restart the process whenever it dies. Returns when it is not started again."""
        deaths = Deaths(self._first_pause_s)
        while True:
            code = await wait_exit(self._children[name])
            if self.stopped():
                return
            if name not in SERVERS and (
                code == 0 or self._state.leaves(self._children.entry(name))
            ):
                how = "drained" if code == 0 else f"told to leave, then {exit_words(code)}"
                self._say(f"{name} finished ({how})", "yellow")
                self._tidy(name)
                return
            log = self._state.log_of(name)
            self._say(f"{name} died ({exit_words(code)}), log: {log}", "bold red")
            if not self._options.restart:
                self._tell_loss(name)
                return
            # A frontend refuses a request after two deaths. Giving up would punish the worker.
            blameless = self._disk_full() or (code == STEP_FAILED and name not in SERVERS)
            if not await self._revive(name, deaths, blameless=blameless):
                return

    def _tidy(self, name: str) -> None:
        """Remove what a process has left that is not started again. Keep the mark that it left, for
        `pullfill status` and `doctor`."""
        if instance_id := self._children.entry(name).instance_id:
            remove_shared_memory([instance_id])
            with suppress(OSError):
                self._state.leaving_of(instance_id).touch()

    async def _revive(self, name: str, deaths: Deaths, *, blameless: bool) -> bool:
        """Start the process again after a pause. False: it is given up, or the cluster stops."""
        while (pause := deaths.pause(time.monotonic(), blameless=blameless)) is not None:
            await self._sleep(pause)
            while name in SERVERS and self._disk_full() and not self.stopped():
                await self._sleep(disk.LOOK_S)
            try:
                return await self.locked(lambda: self._start_again(name))
            except (PullfillError, OSError) as exc:
                self._say(f"{name} was not started again: {exc}", "bold red")
                blameless = False
        if not self.stopped():
            await self._give_up(name)
        return False

    def _start_again(self, name: str) -> None:
        old = self._children.entry(name)
        spec = plan.renewed(self._children.spec(name))
        if old.instance_id:
            remove_shared_memory([old.instance_id])
        self._children.launch(spec, restarts=old.restarts + 1)
        keep_frontends_off(self._options, self._children, [name])

    async def _give_up(self, name: str) -> None:
        what = f"gave up after {MAX_DEATHS} deaths in {WINDOW_S:.0f} s"
        lines = tail(self._state.log_of(name), _LOG_LINES)
        self._children.entry(name).gave_up = "\n".join([what, *lines])
        self._say(self._children.describe(name, what), "bold red")
        self._tell_loss(name)
        with suppress(PullfillError, OSError):  # a disk that cannot be written to
            await self.locked(self._children.record)

    def _tell_loss(self, name: str) -> None:
        if name in SERVERS:
            lost = "remote prefill" if name == "nats" else "joining, leaving or change of settings"
            self._say(
                f"  serving goes on, but without {name} no {lost} until the next `pullfill up`"
            )

    def _disk_full(self) -> bool:
        return disk.is_full(self._state.path)

    async def locked(self, work: Callable[[], None]) -> bool:
        """Do `work` under the lock of the state directory. False: not done, the cluster stops."""
        while not self.stopped():
            try:
                with self._state.locked():
                    if self.stopped():
                        return False
                    work()
                    return True
            except Locked:
                await self._sleep(_LOCK_POLL_S)
        return False

    async def _sleep(self, seconds: float) -> None:
        """Sleep, but end at `stop`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)

    def _say(self, text: str, style: str = "") -> None:
        self._children.view.say(f"{time.strftime('%H:%M:%S')} {text}", style)
