"""The sides of a worker give requests to its engine, and hear of its steps, by an `EngineLoop`.

Our own loop runs the engine's steps (engine/host.py). In stock `vllm serve` vLLM's loop runs them
(engine/stock_host.py). An `EngineLoop` does the same with both: tests/contract/test_ports.py. It
takes requests of frontends (`enter`), and those of prefill workers and self-checks (`add`). Its
hooks tell the sides of each step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from pullfill.engine import front_wire, requests
from pullfill.engine.adapters import Adapters
from pullfill.engine.host import EngineHooks, EngineHost
from pullfill.engine.life import EngineLife
from pullfill.errors import BadMessage, HandoffError, NotNow
from pullfill.worker.context import SchedulerHalf

T = TypeVar("T")

# The wave of requests that come past vLLM's servers, which count waves. A rank of a data parallel
# group that gets such a request wakes the others.
_NO_WAVE = -1


class EngineLoop(EngineHooks):
    """See the module. Any thread may call it, except where a heading says otherwise.

    adapters: the LoRA adapters of the engine.
    sides: those that are told of steps.
    submit, wake, use, register, waiting_for_blocks: see EngineHost."""

    def __init__(
        self,
        host: EngineHost,
        life: EngineLife[Any],
        adapters: Adapters,
        sides: Sequence[SchedulerHalf] = (),
    ) -> None:
        self._host, self._core = host, host.core
        self._life = life
        self._sides = sides
        self._outcomes: dict[str, Future[Any]] = {}
        self.adapters = adapters
        self.config = host.core.vllm_config
        self.submit, self.wake = host.submit, host.wake
        self.use, self.register = host.use, host.register
        self.waiting_for_blocks = host.waiting_for_blocks

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work()` as `submit` does. Returns or raises what it does. asyncio thread.

        Raises NotNow if the engine has ended."""
        done = Future[T]()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as exc:
                done.set_exception(exc)

        self.submit(run)
        result = asyncio.wrap_future(done)
        ended: asyncio.Future[Any] = asyncio.create_task(self._life.dead.wait())
        try:
            await asyncio.wait([result, ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if not result.done():  # the engine, or the process of a rank, has ended meanwhile
            raise NotNow(f"the engine has ended: {self._life.failure!r}")
        return result.result()

    def add(self, request: Any) -> Future[Any]:
        """Have the engine compute a request. Returns its outcome: the last EngineCoreOutput.

        The outcome is set on the engine thread. It is BadMessage if the request's adapter cannot be
        loaded, and HandoffError if the engine refuses or fails the request. It stays open if the
        request is aborted.

        request: vLLM's EngineCoreRequest. An adapter is named as `Adapters.named` returns it."""
        name, outcome = request.request_id, Future[Any]()
        outcome.set_running_or_notify_cancel()  # who waits no more must not cancel it
        self._outcomes[name] = outcome

        def put() -> None:
            if name not in self._outcomes:
                return  # it was aborted before
            try:
                if request.lora_request is not None:
                    request.lora_request = self.adapters.load(self._core, request.lora_request)
                made, _ = self._core.preprocess_add_request(request)
                self._core.add_request(made, _NO_WAVE)
            except BadMessage as exc:
                self._end(name, exc)
            except Exception as exc:
                refused = HandoffError(f"the engine refused the prompt: {exc}")
                refused.__cause__ = exc
                self._end(name, refused)

        self._host.enter(put)
        return outcome

    def abort(self, request_id: str, forgotten: Callable[[], object]) -> None:
        """Abort a request if it still runs.

        forgotten: called on the engine thread once the engine runs no such request any more."""
        runs = self._outcomes.pop(request_id, None) is not None

        def forget() -> None:
            self._core.abort_requests([request_id])
            forgotten()

        # One that has ended holds nothing that anybody waits for.
        self.submit(forget, wake=runs)

    def _end(self, name: str, outcome: Any) -> None:
        if (future := self._outcomes.pop(name, None)) is None:
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def before_step(self) -> None:
        for side in self._sides:
            report = side.before_step()
            if report.loaded or report.sent:
                self._host.copied(report.loaded, report.sent)
        for side in self._sides:
            side.plan()

    def after_step(self, running: int) -> None:
        for side in self._sides:
            side.step_done(running)

    def on_outputs(self, outputs: dict[int, Any]) -> None:
        if (batch := outputs.pop(requests.OWN_CLIENT, None)) is None:
            return
        if outputs and batch.scheduler_stats is not None:
            # vLLM sends a step's statistics with one of its outputs. Frontends need them. If none
            # has a request in the step, what it counts is not theirs.
            next(iter(outputs.values())).scheduler_stats = batch.scheduler_stats
        for output in batch.outputs:
            if output.finish_reason == front_wire.ERROR:
                self._end(output.request_id, HandoffError("the engine failed the request"))
            elif output.finish_reason is not None:
                self._end(output.request_id, output)

    # Engine thread, except `prepare` and `adding`.

    def prepare(self, request: Any, tokens: memoryview) -> Any:
        """See `engine.requests.prepare`."""
        return requests.prepare(self._core, request, tokens)

    def enter(self, request: Any) -> bool:
        """Give the engine a prepared Request of a frontend. Returns whether it has a grammar.

        Raises BadMessage if its adapter cannot be loaded, and what vLLM raises."""
        self.adapters.admit(self._core, request)
        bound = requests.bound_grammar(request, self._core)
        self._core.add_request(request, _NO_WAVE)
        return bound

    def drop(self, request_ids: Sequence[str]) -> None:
        """Abort requests that `enter` has taken."""
        self._core.abort_requests(request_ids)

    def utility(self, method: str, args: Sequence[Any]) -> Any:
        """Call a method of vLLM's EngineCore."""
        return getattr(self._core, method)(*args)

    def adding(self, fields: Any) -> Callable[[], str]:
        """Read the files of an adapter. Returns a function that loads it: `Adapters.adding`."""
        load = self.adapters.adding(fields)
        return lambda: load(self._core)
