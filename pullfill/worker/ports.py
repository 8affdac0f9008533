"""The ports by which a side knows vLLM: these three, and `View` (engine/view.py).

    vLLM ─▶ connector ─▶ side ─▶ ports ◀─ adapter

An adapter gives the ports: engine_loop.py over a loop that takes our turns. That is our own one
(engine/host.py), or vLLM's in stock `vllm serve` (engine/stock_host.py).
tests/contract/test_ports.py judges both alike.

How the KV memory becomes quiet before it is freed is the same for both, so it needs no port: see
`memory.end`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class StepReport:
    """What vLLM must be told of requests. It crosses processes, so it holds plain types only.

    loaded: their KV has come. failed: their KV will not come, so vLLM computes it.
    sent: they are finished, and nobody reads their blocks any more, so vLLM frees these."""

    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    sent: set[str] = field(default_factory=set)


class Steps(ABC):
    """What a side is told of the engine's steps, and what it reports. A side implements it.

    Engine thread. Nothing here may block. What raises ends the engine."""

    @abstractmethod
    def before_step(self) -> StepReport:
        """Called between two steps, and before the loop sleeps. Returns what vLLM must be told now.

        Nothing of it may be `failed`: vLLM takes that only with a step."""

    def plan(self) -> None:
        """Called after that, once vLLM knows what all sides have reported: plan the next step."""
        return None

    @abstractmethod
    def scheduled(self, output: Any) -> StepReport:
        """vLLM has scheduled a step. Returns what this step must tell vLLM.

        output: vLLM's SchedulerOutput."""

    @abstractmethod
    def step_done(self, running: int) -> None:
        """A step has run, on every rank.

        running: number of scheduled steps that have not run yet. They are the last ones."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether `scheduled` has something to report. Then the engine must take a step, even if it
        has no request to compute."""


class EngineThread(Protocol):
    """The thread that steps the engine. It runs our work between two steps. Any thread may call."""

    def submit(self, work: Callable[[], object], *, wake: bool = True) -> None:
        """Run `work()` before the next step. Work that was submitted first runs first.

        wake: wake an idle engine for it. Otherwise the work may wait for up to a second."""

    def wake(self) -> None:
        """Have an idle engine look around: it calls `Steps.before_step`."""

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work()` as `submit` does. Returns or raises what it does. asyncio thread.

        Raises NotNow if the engine has ended."""


class Submit(Protocol):
    """Requests of our own in the engine. Any thread may call."""

    def add(self, request: Any) -> Future[Any]:
        """Have the engine compute a request. Returns its outcome: the last EngineCoreOutput.

        The outcome is set on the engine thread. It is BadMessage if the request's adapter cannot be
        loaded, and HandoffError if the engine refuses or fails the request. It stays open if the
        request is aborted.

        request: vLLM's EngineCoreRequest. An adapter is named as `Adapters.named` returns it."""

    def abort(self, request_id: str, forgotten: Callable[[], object]) -> None:
        """Abort a request if it still runs.

        forgotten: called on the engine thread once the engine runs no such request any more."""
