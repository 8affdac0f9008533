"""Requests that a failed engine step did not touch are found and migrated."""

from __future__ import annotations

import sys
from collections import deque
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine.host import EngineHooks, untouched
from tests.support.engine_host import HostOf


class RequestStatus(Enum):
    """Some of vLLM's, whose import takes five seconds."""

    WAITING = auto()
    WAITING_FOR_REMOTE_KVS = auto()
    PREEMPTED = auto()


@pytest.fixture(autouse=True)
def own_status(monkeypatch: pytest.MonkeyPatch) -> None:
    own = SimpleNamespace(RequestStatus=RequestStatus)
    monkeypatch.setitem(sys.modules, "vllm.v1.request", own)


class Queue(deque[Any]):
    def peek_request(self) -> Any:
        return self[0]


class Scheduler:
    """A queue as vLLM's. fails: while it schedules; else `run` fails."""

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


@pytest.mark.parametrize(("fails", "found"), [(True, {"b", "c"}), (False, {"a", "b", "c"})])
def test_all_of_the_queue_but_what_was_being_scheduled(fails: bool, found: set[str]) -> None:
    scheduler = Scheduler("a", "b", "c", fails=fails)
    assert untouched(scheduler, scheduler.fail()) == found


def test_a_request_that_had_a_part_in_a_step_before_was_touched() -> None:
    scheduler = Scheduler("a", fails=False)
    scheduler.waiting.append(waiting("b", RequestStatus.PREEMPTED))
    scheduler.waiting.append(waiting("c", RequestStatus.WAITING_FOR_REMOTE_KVS))
    scheduler.waiting.append(waiting("d", computed=16))
    assert untouched(scheduler, scheduler.fail()) == {"a"}


@pytest.mark.parametrize("broken", [False, True])
def test_the_engine_tells_it_before_its_loop_ends(broken: bool) -> None:
    """It tells all, and ends with the failure of the step in any case."""
    scheduler: Any = Scheduler("a", "b", fails=True)
    scheduler.has_requests, scheduler.requests = lambda: True, {"a": 1, "b": 2}
    told: list[set[str]] = []

    class Hooks(EngineHooks):
        def on_failed_step(self, untouched: set[str]) -> None:
            told.append(untouched)
            if broken:
                raise RuntimeError("nobody can be told")

    host = HostOf(SimpleNamespace(scheduler=scheduler, batch_queue=None, step_fn=scheduler.run))
    host.use(Hooks())
    host.use(Hooks())
    with pytest.raises(ValueError, match="while scheduling"):
        host.run()
    assert told == [{"b"}, {"b"}]
