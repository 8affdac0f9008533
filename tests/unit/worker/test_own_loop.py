"""Our own loop as ports, around an engine core that is told what to do."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine.adapters import Adapters
from pullfill.errors import HandoffError, NotNow
from pullfill.worker.own_loop import OwnLoop
from tests.support.engine_host import HostOf, looping
from tests.support.waiting import eventually


class Core:
    """As much of an engine core as an idle loop asks for. refuses: it takes no request."""

    def __init__(self) -> None:
        self.refuses = False
        self.aborted: list[str] = []
        self.batch_queue = self.vllm_config = None
        self.scheduler = SimpleNamespace(has_requests=lambda: False, requests={})
        self.preprocess_add_request = lambda request: (request, 0)

    def add_request(self, request: Any, wave: int) -> None:
        if self.refuses:
            raise ValueError("too long")

    def abort_requests(self, names: list[str]) -> None:
        self.aborted += names


class Host(HostOf):
    """Counts how often it was woken."""

    wakes = 0

    def wake(self) -> None:
        self.wakes += 1
        super().wake()


def made(core: Any, life: Any = None, **options: Any) -> tuple[Host, OwnLoop]:
    host = Host(core, **options)
    return host, OwnLoop(host, core, life, Adapters())


REQUEST = SimpleNamespace(request_id="r", lora_request=None)


def output(reason: str) -> Any:
    ours = SimpleNamespace(request_id="r", finish_reason=reason)
    return {-1: SimpleNamespace(outputs=[ours], scheduler_stats=None)}


@pytest.fixture(autouse=True)
def errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without vLLM's enum, whose import takes seconds."""
    monkeypatch.setattr("pullfill.engine.requests.is_error", lambda o: o.finish_reason == "error")


def test_a_request_that_has_ended_is_forgotten_without_a_wake_up() -> None:
    """It holds nothing that anybody waits for. One that still runs holds blocks."""
    for reason, wakes in (("stop", 0), ("", 1)):
        core = Core()
        host, loop = made(core)
        outcome, forgotten = loop.add(REQUEST), list[bool]()
        if reason:
            loop.on_outputs(output(reason))
        assert outcome.done() == bool(reason)
        before = host.wakes
        loop.abort("r", lambda said=forgotten: said.append(True))  # type: ignore[misc]
        assert host.wakes - before == wakes
        with looping(host):
            eventually(lambda said=forgotten: said == [True], "never told")  # type: ignore[misc]
        assert core.aborted == ["r"]


def test_what_the_engine_refuses_or_fails_has_an_error_as_its_outcome() -> None:
    core = Core()
    host, loop = made(core)
    failed: Future[Any] = loop.add(REQUEST)
    loop.on_outputs(output("error"))
    with pytest.raises(HandoffError, match="the engine failed"):
        failed.result()
    core.refuses = True
    refused = loop.add(REQUEST)
    with looping(host), pytest.raises(HandoffError, match="too long"):
        refused.result(5)


def test_work_without_a_wake_up_is_done_all_the_same() -> None:
    """With the next thing that wakes the engine, in order; or when it looks around by itself."""
    done = list[str]()
    host, loop = made(Core(), idle_ms=30)
    loop.submit(lambda: done.append("a"), wake=False)
    loop.submit(lambda: done.append("b"))
    with looping(host):
        eventually(lambda: done == ["a", "b"], "not done")
        loop.submit(lambda: done.append("c"), wake=False)
        eventually(lambda: done == ["a", "b", "c"], "forgotten")


async def test_a_worker_whose_engine_ends_while_it_begins_says_so() -> None:
    life = SimpleNamespace(dead=asyncio.Event(), failure=RuntimeError("a rank ended"))
    _, loop = made(Core(), life)  # nobody takes the work
    asyncio.get_running_loop().call_soon(life.dead.set)
    async with asyncio.timeout(5):
        with pytest.raises(NotNow, match="a rank ended"):
            await loop.call(lambda: None)
