"""When the engine thread of a prefill worker is woken, and when it need not be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine.groups import ONE_GROUP
from pullfill.errors import HandoffError
from pullfill.prefill_worker.engine import PrefillEngine
from tests.support.engine_host import HostOf, looping
from tests.support.fakes import prefill_task
from tests.support.waiting import eventually


class Core:
    """As much of an engine core as an idle loop asks for; `aborted`: what it was told to forget."""

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.batch_queue = None
        self.scheduler = SimpleNamespace(has_requests=lambda: False, requests={})

    def abort_requests(self, names: list[str]) -> None:
        self.aborted += names
        self.scheduler.requests.clear()


class Host(HostOf):
    """Counts how often it was woken."""

    wakes = 0

    def wake(self) -> None:
        self.wakes += 1
        super().wake()


@pytest.mark.parametrize("how", ["well", "failed", "stopped"])
def test_only_a_task_that_ended_well_is_forgotten_without_a_wake_up(how: str) -> None:
    core: Any = Core()
    host, task = Host(core), prefill_task(None, tokens=[1])
    tasks = {task.request_id: task}
    scheduler = SimpleNamespace(tasks=tasks)
    context: Any = SimpleNamespace(scheduler=scheduler, adapters=None, groups=ONE_GROUP)
    engine = PrefillEngine(host, context, block_size=4, compat_hash="c", limit=lambda _: 1)
    if how != "stopped":
        task.end(None if how == "well" else HandoffError("no"))
    engine.end(task)
    assert bool(host.wakes) == (how != "well")
    core.scheduler.requests[task.request_id] = "it still runs"
    with looping(host):
        eventually(lambda: core.aborted == [task.request_id], "it was never told")
    assert not tasks


def test_work_without_a_wake_up_is_done_all_the_same() -> None:
    """With the next thing that wakes the engine, in order; or when it looks around by itself."""
    host, done = HostOf(Core(), idle_ms=30), list[str]()
    host.submit(lambda _: done.append("a"), wake=False)
    host.submit(lambda _: done.append("b"))
    with looping(host):
        eventually(lambda: done == ["a", "b"], "not done")
        host.submit(lambda _: done.append("c"), wake=False)
        eventually(lambda: done == ["a", "b", "c"], "forgotten")
