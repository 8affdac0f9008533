"""One vLLM engine core, stepped by one thread of this process.

Life: on the engine thread, `build`, then `loop` until `stop`, or until a step raises. Everything
that touches the engine runs on that thread. Other threads call `submit` and `wake`. The
engine keeps its memory until `shutdown`: others may still copy from it and to it.

The loop polls the registered descriptors, runs what was submitted, and takes a step if a step can
do something. Otherwise it blocks in poll. vLLM's own loop spins while a request waits for remote
KV. This one sleeps until the ledger or a deadline wakes it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import zmq

from pullfill.engine import environment, requests, speculation
from pullfill.engine.view import tier_of
from pullfill.runtime import failpoints, log

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreOutputs

    from pullfill.engine.tier import Tier

logger = log.get("engine.host")

# How long the loop sleeps while a request waits for what does not wake it, such as a grammar that
# is compiled.
_BLOCKED_MS = 2


class EngineHooks(Protocol):
    """What the host calls, all on the engine thread. These do nothing."""

    def before_step(self) -> None:
        """Called before each step or sleep."""
        return None

    def after_step(self, running: int) -> None:
        """Called after each step.

        running: number of scheduled steps that still run. That is 0 without pipeline parallelism.
        All earlier steps have run, on every rank."""
        return None

    def on_outputs(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Called after each step with {client index: outputs}. Take out what is yours."""
        return None

    def on_failed_step(self, untouched: set[str]) -> None:
        """Called when a step has raised and the loop is about to end.

        untouched: IDs of the requests that the step did not touch."""
        return None

    def on_aborted(self, request_ids: set[str]) -> None:
        """Called when vLLM has aborted requests by itself. The loop goes on."""
        return None


@dataclass(frozen=True, slots=True)
class Pulse:
    """What the engine thread does now.

    busy: what it does. "" while it has no work and sleeps.
    requests: number of requests in the engine, or on the way to it."""

    beat: int
    busy: str
    requests: int


class EngineHost:
    """Owns the engine core and its thread's loop.

    core: vLLM's EngineCore. None until it is built.
    log_stats: whether vLLM collects statistics in each step. They come with the outputs.
    idle_ms: how long the loop sleeps without work.
    """

    def __init__(
        self,
        config: VllmConfig,
        *,
        log_stats: bool = True,
        idle_ms: int = 1_000,
    ) -> None:
        self._idle_ms = idle_ms
        self._config = config
        self._log_stats = log_stats
        self._hooks: list[EngineHooks] = []
        self._todo: deque[Callable[[], object]] = deque()
        self._wakefd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._fd_handlers: dict[Any, Callable[[], None]] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._wakefd, zmq.POLLIN)
        self.core: Any = None
        self._tier: Tier | None = None
        self._beat = 0
        self._doing = ""
        self._timeout = 0  # ms of the next wait for work
        self._blocked_at: float | None = None
        self._heap = environment.Heap()

    # ------------------------------------------------------------------ any thread

    def submit(self, work: Callable[[], object], *, wake: bool = True) -> None:
        """Run `work()` on the engine thread, before its next step.

        wake: wake an idle engine for it. Otherwise the work may wait for up to a second."""
        self._todo.append(work)
        if wake:
            self.wake()

    def enter(self, work: Callable[[], object]) -> None:
        """`submit` for work that gives the engine a request."""
        self.submit(work)

    def wake(self) -> None:
        """Make the loop look around. From any thread, also after the end."""
        with contextlib.suppress(OSError, ValueError):
            os.eventfd_write(self._wakefd, 1)

    def pulse(self) -> Pulse:
        """What the engine thread does, for the watchdog. Maybe a moment old."""
        count = len(self._todo) + sum(self.core.scheduler.get_request_counts())
        return Pulse(self._beat, self._doing, count)

    def stop(self) -> None:
        """Leave the loop after the current step. Requests still inside are dropped."""
        self._stopping = True
        self.wake()

    # ------------------------------------------------------------------ engine thread

    def use(self, hooks: EngineHooks) -> None:
        """Have the loop call these hooks, too, after those that it calls already. Engine thread."""
        self._hooks.append(hooks)

    def register(self, socket: Any, handler: Callable[[], None]) -> None:
        """Poll a ZMQ socket for reading in the loop. Engine thread."""
        self._fd_handlers[socket] = handler
        self._poller.register(socket, zmq.POLLIN)

    def build(self) -> None:
        """Load the model and allocate the KV cache. Engine thread. Takes seconds."""
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        config = self._config
        environment.end_imports()
        self.core = EngineCore(config, Executor.get_class(config), log_stats=self._log_stats)
        speculation.compile_drafter(self.core)
        self._tier = tier_of(self.core)

    def loop(self) -> None:
        """Take turns until `stop`. What was built is still there when this returns or raises."""
        while not self._stopping:
            self.turn()

    def shutdown(self) -> None:
        """After `loop`: let vLLM free what it has, also the KV cache, and end its processes."""
        if self.core is not None:
            # vLLM collects garbage several times here. Each time would visit every object of every
            # module: most of the CPU time of a worker's end, for what ends with the process.
            gc.freeze()
            with contextlib.suppress(Exception):
                self.core.shutdown()

    def turn(self) -> bool:
        """Take in work, and take a step if a step can do something. Engine thread.

        Returns whether the step ran the model. Raises what a step raises."""
        core, came = self.core, self._take_in(self._timeout)
        quiet = self._timeout == self._idle_ms and not came
        for hooks in self._hooks:
            hooks.before_step()
        if not (self._copies_run() or core.batch_queue or self._has_requests(quiet)):
            self._timeout = self._idle_ms if not self._todo else 0
            self._blocked_at = None
            return False
        self._doing = "a step"
        failpoints.hit("engine.step")
        try:
            outputs, executed = core.step_fn()
        except Exception as exc:
            self._tell_failed(exc)
            raise
        for hooks in self._hooks:
            hooks.after_step(len(core.batch_queue or ()))
        if outputs:
            self._give(outputs)
        core.post_step(executed)
        self._heap.after_step()
        timeout = self._timeout = 0 if core.batch_queue else self._pause(executed)
        if executed or timeout == self._idle_ms:
            self._blocked_at = None
        elif timeout == _BLOCKED_MS and self._blocked_at is None:
            self._blocked_at = time.monotonic()
        return bool(executed)

    def _has_requests(self, quiet: bool) -> bool:
        """Whether a step has a request. quiet: nothing has come for long."""
        # `requests` also has those that are finished, and whose blocks a peer still reads. After
        # the last one has gone, `has_requests` asks for one more step, which tells the model
        # runner. The next step that has requests tells it as well, so that step is taken only if
        # nothing has come for long: it costs each short request a step, and a report to each
        # frontend.
        scheduler = self.core.scheduler
        return bool(scheduler.requests or (quiet and scheduler.has_requests()))

    def _give(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Give a step's outputs to those whose requests they are of."""
        for hooks in self._hooks:
            if outputs:
                hooks.on_outputs(outputs)

    def _tell_failed(self, failure: Exception) -> None:
        """Tell all hooks that a step has raised. One that fails keeps none from hearing it."""
        for hooks in self._hooks:
            try:
                hooks.on_failed_step(untouched(self.core.scheduler, failure))
            except Exception:
                logger.exception("could not migrate the requests that the step did not touch")

    def copied(self, received: Collection[str], sent: Collection[str]) -> None:
        """Tell vLLM which copies of KV are done. Engine thread, between steps.

        This calls vLLM's scheduler directly. A connector's report, vLLM's own way, takes a step.

        received: waiting requests whose KV has arrived. The next step runs them, and makes their
        first tokens.
        sent: finished requests whose blocks nobody reads any more. vLLM frees the blocks."""
        from vllm.v1.outputs import KVConnectorOutput

        self.core.scheduler._update_from_kv_xfer_finished(
            KVConnectorOutput(finished_recving=set(received), finished_sending=set(sent))
        )

    def waiting_for_blocks(self, longer_than_s: float) -> set[str]:
        """Return the requests that wait because the first of them finds too few free blocks.

        Empty unless no step has run any request for `longer_than_s`. Any thread."""
        if (since := self._blocked_at) is None or time.monotonic() - since < longer_than_s:
            return set()
        status = requests.statuses()
        waiting = (status.WAITING, status.PREEMPTED)
        inside = list(self.core.scheduler.requests.values())
        return {request.request_id for request in inside if request.status in waiting}

    def _copies_run(self) -> bool:
        """Whether vLLM's KV offloading copies. vLLM learns of the end in a step."""
        return self._tier is not None and bool(self._tier.has_pending_push_work())

    def _take_in(self, timeout_ms: int) -> bool:
        """Wait for work, and run what was submitted. Returns False if nothing came."""
        self._doing = ""
        if timeout_ms:
            ready = [socket for socket, _ in self._poller.poll(timeout_ms)]
        else:
            # Between two steps. To poll would let the GIL go, and the engine would wait until the
            # thread that sends the last step's outputs is done. The model lets it go often enough.
            ready = [one for one in self._fd_handlers if one.get(zmq.EVENTS) & zmq.POLLIN]
        self._beat += 1
        self._doing = "taking in work"
        for socket in ready:
            if socket == self._wakefd:
                try:
                    os.eventfd_read(self._wakefd)
                except BlockingIOError:
                    pass
            else:
                self._fd_handlers[socket]()
        came = bool(ready or self._todo)
        while self._todo:
            self._todo.popleft()()
        return came

    def _pause(self, executed: bool) -> int:
        """Return how long to sleep after a step, in ms.

        Requests that wait for remote KV, and finished requests whose blocks wait for a report, need
        no polling: `wake` ends the sleep. A request that waits for anything else, such as a grammar
        that is compiled, is looked at again soon.

        executed: whether the step ran the model."""
        scheduler = self.core.scheduler
        if executed and scheduler.running:
            return 0
        if scheduler.finished_recving_kv_req_ids:
            return 0  # the next step schedules them
        if self._copies_run():
            return _BLOCKED_MS
        status = requests.statuses()
        for request in scheduler.requests.values():
            waits = request.status is status.WAITING_FOR_REMOTE_KVS
            if not waits and not status.is_finished(request.status):
                return 0 if executed else _BLOCKED_MS
        return self._idle_ms


def untouched(scheduler: Any, error: BaseException) -> set[str]:
    """Return the waiting requests that a failed step cannot have touched.

    scheduler: vLLM's. error: what the step has raised."""
    waits = requests.statuses().WAITING
    fresh = [
        request
        for request in scheduler.waiting
        if request.status == waits and not request.num_computed_tokens
    ]
    code = type(scheduler).schedule.__code__
    frames = traceback.walk_tb(error.__traceback__)
    if fresh and any(frame.f_code is code for frame, _ in frames):
        # It failed while it scheduled. vLLM takes requests off the head of its queue, and looks at
        # no other one in it. Those that it has looked at and put aside are not in the queue now.
        head = scheduler.waiting.peek_request()
        fresh = [request for request in fresh if request is not head]
    return {request.request_id for request in fresh}
