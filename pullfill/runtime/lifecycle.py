"""How a worker process ends.

The first SIGTERM or SIGINT starts a drain: the worker takes no new work and finishes what it has.
The second one ends the process at once, and so does the first one while the worker starts.
`exit_within` ends a process whose way out hangs.
`stop_listening` closes a server without losing a connection that it is accepting. `Tasks` holds
tasks that nobody waits for, and `end` ends tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn

from pullfill.runtime import log

logger = log.get("lifecycle")

# Longest time from the end of a drain, or from being forced, to the end of the process. The limits
# of all steps add up to less. This one is for hangs that nobody thought of.
EXIT_S = 20.0
# Longest time that `exit_within` waits for what `at_leave` has registered.
LAST_S = 5.0
# Longest time that it waits for its own line in the log, after that.
_TELL_S = 0.1
# Where `up` looks whether a process that died was told to leave. Such a process makes the file.
LEAVING_ENV = "PULLFILL_LEAVING_FILE"
# Exit code of a worker whose engine raised an exception in a step. A request may be the cause.
STEP_FAILED = 3


class Stop:
    """Whether this process must end.

    drain: finish what is there, then exit 0. force: exit now. Once set, both stay set.
    starting: there is nothing to finish yet, so a signal ends the process at once."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.force = asyncio.Event()
        self.reason = ""
        self.starting = False
        self._signalled = False

    def install(self) -> None:
        """Handle SIGTERM and SIGINT on the running loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask, signal.Signals(number).name)

    def ask(self, reason: str) -> None:
        """Ask to drain. A second signal forces.

        A revoked lease is no signal. So a SIGTERM after it does not force."""
        signalled = reason.startswith("SIG")
        if signalled and self.starting:
            logger.info("%s: stopping before it has started", reason)
            leave(0)
        if signalled and self._signalled:
            self.now(f"{reason} again")
            return
        self._signalled |= signalled
        self.reason = self.reason or reason
        logger.info("%s: draining%s", reason, " (once more forces)" if signalled else "")
        if mark := os.environ.get(LEAVING_ENV):
            with contextlib.suppress(OSError):
                Path(mark).touch()
        self.drain.set()

    def now(self, reason: str) -> None:
        """Force the process to end."""
        logger.warning("%s: stopping now", reason)
        self.reason = self.reason or reason
        self.drain.set()
        self.force.set()
        exit_within(EXIT_S, 1)

    async def race(self, work: Awaitable[object], timeout_s: float) -> bool:
        """Wait for `work`, at most `timeout_s`, or until forced. Returns whether it finished."""
        task = asyncio.ensure_future(work)
        forced = asyncio.ensure_future(self.force.wait())
        await asyncio.wait({task, forced}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        done = task.done()
        for future in (task, forced):
            future.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await future
        return done


def exit_within(seconds: float, code: int) -> None:
    """End this process with `code` after that time, if it is still there then.

    What `at_leave` has registered is called first, and has LAST_S at most.
    It does not matter what hangs: the event loop, or the reader of the log."""

    def end_now() -> None:
        time.sleep(seconds)
        try:
            # In threads of their own: the reader of the log may hang, and so may what is done last.
            told = ("shutdown took longer than %g s: exiting at once", seconds)
            tell = threading.Thread(target=logger.error, args=told, daemon=True)
            last = threading.Thread(target=_do_last, daemon=True)
            tell.start()
            last.start()
            last.join(LAST_S)
            tell.join(_TELL_S)
        finally:
            os._exit(code)

    threading.Thread(target=end_now, daemon=True).start()


_last: list[Callable[[], None]] = []


def at_leave(work: Callable[[], None]) -> Callable[[], None]:
    """Register `work`. `leave` and `exit_within` call it before they end the process.

    work: must not block. Returns a function that removes it again. Use it for what outlives the
    process, like files in shared memory."""
    _last.append(work)
    return lambda: _last.remove(work) if work in _last else None


def leave(code: int) -> NoReturn:
    """End this process now, after its output is flushed.

    No thread, exit hook or closing event loop can hold it."""
    _do_last()
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # e.g. a log on a full disk
            output.flush()
    os._exit(code)


def _do_last() -> None:
    for work in list(_last):
        with contextlib.suppress(Exception):
            work()


async def stop_listening(server: asyncio.Server) -> None:
    """Close `server`, and wait until each accepted connection has reached its protocol.

    `Server.close` alone can lose a connection that was accepted just before it
    (python/cpython#109564). No object closes its socket, and the peer waits until the garbage
    collector does.
    """
    loop = server.get_loop()
    for listener in server.sockets:
        loop.remove_reader(listener)
    for _ in range(3):  # turns of the loop: make the transport, call the protocol, start a task
        await asyncio.sleep(0)
    server.close()


class Tasks(set[asyncio.Task[Any]]):
    """Tasks that run on their own. Each is in the set until it has ended. Its error is logged."""

    def begin(self, work: Coroutine[Any, Any, object], name: str) -> asyncio.Task[Any]:
        """Run `work`. name: for the log."""
        return self.keep(asyncio.create_task(work, name=name))

    def keep(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        """Take a task that was begun elsewhere."""
        self.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s: stopped by an error", task.get_name(), exc_info=error)


async def end(*tasks: asyncio.Task[Any] | None, again_s: float = 5.0) -> None:
    """Cancel these tasks, and wait until they have ended. Their errors are dropped.

    again_s: cancel a task again that still runs after this time."""
    left = {task for task in tasks if task is not None}
    while left:
        for task in left:
            task.cancel()
        # On Python 3.11 `asyncio.wait_for`, which nats-py uses, drops a cancellation that comes
        # together with what it waits for. Then the task goes on as if nothing had been said.
        done, left = await asyncio.wait(left, timeout=again_s)
        for task in done:
            if not task.cancelled():
                task.exception()


async def until(*events: asyncio.Event) -> None:
    """Return when the first of `events` is set."""
    waits = [asyncio.ensure_future(e.wait()) for e in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
