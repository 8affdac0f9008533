"""What a worker says of itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.config import ClusterRef
from pullfill.options import WorkerOptions
from pullfill.wire import WorkerState
from pullfill.worker.process import WorkerProcess


@pytest.mark.parametrize(("role", "ready"), [("decode", False), ("prefill", True)])
def test_a_decode_worker_is_not_ready_before_it_gets_requests(role: str, ready: bool) -> None:
    """Kubernetes would end the old pod while frontends send nothing to the new one."""
    why = "self_check_pending"
    service: Any = SimpleNamespace(checking=lambda: why, reasons=list, told=dict)
    side: Any = SimpleNamespace(name=role, service=service)
    options = WorkerOptions(model="m")
    worker: Any = WorkerProcess([side], role, "w-1", ClusterRef("n", "e", "q"), options, [])
    worker._switch = SimpleNamespace(services=[service], sides=[side], told="", roles=role)
    worker._guard = SimpleNamespace(detail=dict)
    said, detail = worker._ready()
    assert (said, detail["state"], detail["reasons"]) == (ready, WorkerState.CHECKING, [why])
    why = ""
    said, detail = worker._ready()
    assert (said, detail["state"], detail["reasons"]) == (True, WorkerState.READY, [])
