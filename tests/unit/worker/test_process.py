"""What a worker says of itself, and how its process ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.config import ClusterRef
from pullfill.errors import ConfigError, NotNow
from pullfill.options import WorkerOptions
from pullfill.runtime import log
from pullfill.wire import WorkerState
from pullfill.worker import process
from pullfill.worker.worker import Worker


@pytest.mark.parametrize(("role", "ready"), [("decode", False), ("prefill", True)])
def test_a_decode_worker_is_not_ready_before_it_gets_requests(role: str, ready: bool) -> None:
    """Kubernetes would end the old pod while frontends send nothing to the new one."""
    why = "self_check_pending"
    service: Any = SimpleNamespace(checking=lambda: why, reasons=list, told=dict)
    options = WorkerOptions(model="m", instance_id="w-1")
    worker: Any = Worker([], ClusterRef("n", "e", "q"), options)
    worker._sides[role] = service
    worker._guard = SimpleNamespace(detail=dict)
    said, detail = worker._ready()
    assert (said, detail["state"], detail["reasons"]) == (ready, WorkerState.CHECKING, [why])
    why = ""
    said, detail = worker._ready()
    assert (said, detail["state"], detail["reasons"]) == (True, WorkerState.READY, [])


@pytest.mark.parametrize(("debug", "kind", "code"), [("", ConfigError, 2), ("1", NotNow, 1)])
async def test_a_worker_that_ends_shows_where_if_asked(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    debug: str,
    kind: type[ConfigError],
    code: int,
) -> None:
    def serve(*_: Any) -> Any:
        raise kind("no good")

    codes: list[int] = []
    monkeypatch.setenv(log.DEBUG_ENV, debug)
    monkeypatch.setattr(process, "leave", codes.append)
    monkeypatch.setattr(process.check, "require_version", lambda: "")
    monkeypatch.setattr(process, "WorkerProcess", serve)
    await process._serve("decode", ClusterRef("n", "e", "q"), WorkerOptions(model="m"), [])
    told = capsys.readouterr().err
    assert codes == [code]
    assert told.endswith("error: no good\n")
    assert ("in serve" in told) == bool(debug)
