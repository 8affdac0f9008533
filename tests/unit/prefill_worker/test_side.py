"""What a prefill worker sets up before it pulls."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.config import ClusterRef
from pullfill.options import WorkerOptions
from pullfill.prefill_worker.side import PrefillRole, PrefillService
from pullfill.transfer.gpu import copies


async def test_its_engine_is_told_when_gpu_copies_have_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise it would take job after job, and fail to write each."""

    told: list[str] = []
    role = PrefillRole(ClusterRef("n", "http://e", "nats://q"), WorkerOptions(model="m"))
    monkeypatch.setattr(role, "open_memory", print)
    monkeypatch.setattr(copies, "_watchers", [])
    engine: Any = SimpleNamespace(context=None)
    thread: Any = SimpleNamespace(fail=told.append)
    parts: Any = AsyncExitStack()
    await role.build(engine, thread, None, parts)  # type: ignore[arg-type]
    for tell in copies._watchers:
        tell("copies on a GPU have failed")
    assert told == ["copies on a GPU have failed"]


async def test_a_change_of_the_directory_that_changes_nothing_here_is_not_noted() -> None:
    """Each note has etcd asked for our keys: in a fleet that starts, by each worker for each."""
    nothing: Any = None
    changes: list[Any] = []
    links: Any = SimpleNamespace(start=changes.append, checking="")
    noted: list[str] = []
    puller: Any = SimpleNamespace(pause=lambda _, why: noted.append(why), start=lambda: None)
    hello: Any = SimpleNamespace(computes="c")
    service = PrefillService(nothing, nothing, links, puller, nothing, nothing, [], hello)
    notes: list[str] = []
    await service.start(lambda: notes.append(links.checking))
    (changed,) = changes
    for why in ("", "", "not compared yet", "not compared yet", "", ""):
        links.checking = why
        changed()
    assert noted == notes == ["not compared yet", ""]
