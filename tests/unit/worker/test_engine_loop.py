"""The ports over an engine loop, around an engine core that is told what to do."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine import front_wire
from pullfill.engine.adapters import Adapters
from pullfill.errors import HandoffError
from pullfill.worker.context import StepReport
from pullfill.worker.engine_loop import EngineLoop
from tests.support.engine_host import HostOf, looping


class Core:
    """As much of an engine core as an idle loop asks for. refuses: it takes no request."""

    def __init__(self) -> None:
        self.refuses = False
        self.batch_queue = self.vllm_config = None
        self.scheduler = SimpleNamespace(has_requests=lambda: False, requests={})
        self.preprocess_add_request = lambda request: (request, 0)

    def add_request(self, request: Any, wave: int) -> None:
        if self.refuses:
            raise ValueError("too long")


def test_a_step_is_planned_once_vllm_knows_what_all_sides_have_reported() -> None:
    said: list[str] = []

    class Side:
        def __init__(self, name: str) -> None:
            self.name = name

        def before_step(self) -> StepReport:
            return StepReport(loaded={self.name})

        def plan(self) -> None:
            said.append(f"plan of {self.name}")

    host: Any = SimpleNamespace(submit=None, wake=None, use=None, register=None)
    host.waiting_for_blocks, host.core = None, Core()
    host.copied = lambda received, sent: said.extend(received)
    sides: Any = [Side("a"), Side("b")]
    EngineLoop(host, None, Adapters(), sides).before_step()  # type: ignore[arg-type]
    assert said == ["a", "b", "plan of a", "plan of b"]


def test_what_the_engine_refuses_or_fails_has_an_error_as_its_outcome() -> None:
    host, request = HostOf(core := Core()), SimpleNamespace(request_id="r", lora_request=None)
    loop = EngineLoop(host, None, Adapters())  # type: ignore[arg-type]
    failed: Future[Any] = loop.add(request)
    ours = SimpleNamespace(request_id="r", finish_reason=front_wire.ERROR)
    # vLLM sends statistics once. Frontends need them, and get no outputs of jobs.
    client = SimpleNamespace(scheduler_stats=None)
    outputs = {-1: SimpleNamespace(outputs=[ours], scheduler_stats="stats"), 0: client}
    loop.on_outputs(outputs)
    assert outputs == {0: client}
    assert client.scheduler_stats == "stats"
    with pytest.raises(HandoffError, match="the engine failed"):
        failed.result()
    core.refuses = True
    refused = loop.add(request)
    with looping(host), pytest.raises(HandoffError, match="too long"):
        refused.result(5)
