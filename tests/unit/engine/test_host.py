"""The engine's loop around a core that is told what to do."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine import requests
from pullfill.engine.host import EngineHost, untouched
from tests.support.engine_host import HostOf, looping
from tests.support.waiting import eventually

REMOTE, WAITING, OVER = "waits for remote KV", "waits for blocks", "finished"
STATUS = SimpleNamespace(WAITING_FOR_REMOTE_KVS=REMOTE, is_finished=lambda status: status is OVER)


class Scheduler:
    """Requests by id; `left`: steps that the running one still takes. Counts steps."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.running: list[str] = []
        self.finished_recving_kv_req_ids: set[str] = set()
        self.finished: list[str] = []
        self.told: list[list[str]] = []
        self.batch_queue = None
        self.scheduler = self

    def has_requests(self) -> bool:
        return bool(self.requests or self.finished)

    def run(self, name: str, steps: int) -> None:
        self.requests[name] = SimpleNamespace(status="runs", left=steps)
        self.running.append(name)

    def step_fn(self) -> tuple[dict[int, str], bool]:
        self.told.append(self.finished)
        self.finished = []
        ran = list(self.running)
        for name in ran:
            self.requests[name].left -= 1
            if not self.requests[name].left:
                self.running.remove(name)
                del self.requests[name]
                self.finished.append(name)
        return {}, bool(ran)

    def post_step(self, executed: bool) -> None:
        pass


@pytest.fixture
def engine(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[tuple[EngineHost, Scheduler]]:
    """A host whose loop runs, and its core. Its idle poll outlasts what the tests wait for."""
    monkeypatch.setattr(requests, "statuses", lambda: STATUS)
    core = Scheduler()
    with looping(host := HostOf(core, idle_ms=getattr(request, "param", 20_000))):
        yield host, core


def test_no_step_is_taken_to_tell_only_what_has_finished(
    engine: tuple[EngineHost, Scheduler],
) -> None:
    """The model runner hears of it in the next step."""
    host, core = engine
    host.submit(lambda: core.run("a", 2))
    eventually(lambda: len(core.told) >= 2, "no steps")
    time.sleep(0.02)
    assert core.told == [[], []], "and no more"
    host.submit(lambda: core.run("b", 1))
    eventually(lambda: len(core.told) >= 3, "no step")
    time.sleep(0.02)
    assert core.told == [[], [], ["a"]]


@pytest.mark.parametrize("engine", [30], indirect=True)
def test_what_has_finished_is_told_in_the_end(engine: tuple[EngineHost, Scheduler]) -> None:
    host, core = engine
    host.submit(lambda: core.run("a", 1))
    eventually(lambda: core.told == [[], ["a"]], "not told")
    time.sleep(0.1)
    assert core.told == [[], ["a"]], "told again and again"


def test_after_the_last_running_request_those_without_kv_take_no_step(
    engine: tuple[EngineHost, Scheduler],
) -> None:
    host, core = engine

    def begin() -> None:
        core.requests["far"] = SimpleNamespace(status=REMOTE)
        core.run("a", 2)

    host.submit(begin)
    eventually(lambda: len(core.told) == 2, "no steps")
    time.sleep(0.05)
    assert len(core.told) == 2


def test_a_request_that_was_left_out_of_a_step_gets_the_next_one(
    engine: tuple[EngineHost, Scheduler],
) -> None:
    """The blocks of the one that ended may be all that it waits for."""
    host, core = engine

    def begin() -> None:
        core.requests["next"] = SimpleNamespace(status=WAITING)
        core.run("a", 1)

    began = time.monotonic()
    host.submit(begin)
    eventually(lambda: len(core.told) > 3, "it waits")
    assert time.monotonic() - began < 10.0, "it waited for the idle poll"


# Requests that it did not touch are found. They migrate: tests/chaos/test_failed_step.py


class RequestStatus(Enum):
    """Some of vLLM's, whose import takes five seconds."""

    WAITING = auto()
    WAITING_FOR_REMOTE_KVS = auto()
    PREEMPTED = auto()


@pytest.fixture
def own_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "statuses", lambda: RequestStatus)


class Queue(deque[Any]):
    def peek_request(self) -> Any:
        return self[0]


class Failing:
    """A scheduler with a queue as vLLM's. fails: while it schedules; else `run` fails."""

    def __init__(self, *names: str, fails: bool) -> None:
        self.waiting = Queue(waiting(name) for name in names)
        self._fails = fails

    def schedule(self) -> None:
        if self._fails:
            raise ValueError("while scheduling")

    def run(self) -> None:
        self.schedule()
        raise ValueError("while the model ran")

    def fail(self) -> Exception:
        try:
            self.run()
        except ValueError as exc:
            return exc
        raise AssertionError


def waiting(name: str, status: Any = RequestStatus.WAITING, computed: int = 0) -> Any:
    return SimpleNamespace(request_id=name, status=status, num_computed_tokens=computed)


@pytest.mark.usefixtures("own_status")
@pytest.mark.parametrize(("fails", "found"), [(True, {"b", "c"}), (False, {"a", "b", "c"})])
def test_all_of_the_queue_but_what_was_being_scheduled(fails: bool, found: set[str]) -> None:
    scheduler = Failing("a", "b", "c", fails=fails)
    assert untouched(scheduler, scheduler.fail()) == found


@pytest.mark.usefixtures("own_status")
def test_a_request_that_had_a_part_in_a_step_before_was_touched() -> None:
    scheduler = Failing("a", fails=False)
    scheduler.waiting.append(waiting("b", RequestStatus.PREEMPTED))
    scheduler.waiting.append(waiting("c", RequestStatus.WAITING_FOR_REMOTE_KVS))
    scheduler.waiting.append(waiting("d", computed=16))
    assert untouched(scheduler, scheduler.fail()) == {"a"}
