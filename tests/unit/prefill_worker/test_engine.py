"""When the engine thread of a prefill worker is woken, and when it need not be."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from pullfill.engine import host as hosts
from pullfill.engine.host import EngineHost
from pullfill.errors import HandoffError
from pullfill.prefill_worker.engine import PrefillEngine
from pullfill.prefill_worker.task import PrefillTask
from pullfill.wire import FenceToken
from tests.support.waiting import eventually


class Core:
    """As much of an engine core as an idle loop asks for; `aborted`: what it was told to forget."""

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.batch_queue = None
        self.scheduler = SimpleNamespace(has_requests=lambda: False, requests={})

    def abort_requests(self, names: list[str]) -> None:
        self.aborted += names


def a_host() -> EngineHost:
    config: Any = None
    host = EngineHost(config)
    host._poller = zmq.Poller()
    host._poller.register(host._wakefd, zmq.POLLIN)
    return host


def woken(host: EngineHost) -> bool:
    try:
        os.eventfd_read(host._wakefd)
    except BlockingIOError:
        return False
    return True


def a_task(name: str = "j.1") -> PrefillTask:
    return PrefillTask(
        request_id=name, job_id="j", attempt=1, token_ids=[1], block_size=4, hit_tokens=0,
        remote_blocks=[0], fence=FenceToken(slot=0, epoch=1), cache_salt=None, priority=0,
        transfer_worker=None, on_done=lambda _: None,
    )  # fmt: skip


@pytest.mark.parametrize("how", ["well", "failed", "stopped"])
def test_only_a_task_that_ended_well_is_forgotten_without_a_wake_up(how: str) -> None:
    host, task = a_host(), a_task()
    context: Any = SimpleNamespace(tasks={task.request_id: task})
    engine = PrefillEngine(host, context, block_size=4, compat_hash="c")
    if how != "stopped":
        task.end(None if how == "well" else HandoffError("no"))
    engine.end(task)
    assert woken(host) == (how != "well")
    core: Any = Core()
    core.scheduler.requests[task.request_id] = "it still runs"
    host._take_in(core, 0)
    assert core.aborted == [task.request_id]
    assert not context.tasks


def test_work_without_a_wake_up_is_done_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the next thing that wakes the engine, in order; or when it looks around by itself."""
    monkeypatch.setattr(hosts, "_IDLE_POLL_MS", 30)
    host, done = a_host(), list[str]()
    core: Any = Core()
    thread = threading.Thread(target=host._loop, args=(core,))
    host.submit(lambda _: done.append("a"), wake=False)
    host.submit(lambda _: done.append("b"))
    thread.start()
    try:
        eventually(lambda: done == ["a", "b"], "not done")
        host.submit(lambda _: done.append("c"), wake=False)
        eventually(lambda: done == ["a", "b", "c"], "forgotten")
    finally:
        host.stop()
        thread.join(10)
