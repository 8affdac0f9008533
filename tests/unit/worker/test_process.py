"""What a worker says of itself, how its process ends, and what two sides cannot do."""

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
from pullfill.worker.process import advertised, kv_port_of
from pullfill.worker.worker import Worker


def test_the_second_side_listens_at_the_next_port_if_it_is_free() -> None:
    options = WorkerOptions(model="m", kv_port=7000, control_port=7002)
    assert [kv_port_of(options, number) for number in (0, 1)] == [7000, 7001]
    assert kv_port_of(WorkerOptions(model="m"), 1) == 0, "any"
    for flag in ("http_port", "control_port", "data_port"):
        given: dict[str, Any] = {flag: 7001}
        with pytest.raises(ConfigError, match="--kv-port 7000 also needs port 7001"):
            kv_port_of(WorkerOptions(model="m", kv_port=7000, **given), 1)
    with pytest.raises(ConfigError, match="choose another"):
        kv_port_of(WorkerOptions(model="m", kv_port=65535), 1)


def test_the_second_side_tells_the_next_port() -> None:
    assert advertised("tcp://h:7000", 0) == "tcp://h:7000"
    assert advertised("tcp://h:7000", 1) == "tcp://h:7001"
    assert advertised(None, 1) is None
    with pytest.raises(ConfigError, match="--advertise-kv of the prefill side"):
        advertised("tcp://h:65535", 1)


@pytest.mark.parametrize(("role", "ready"), [("decode", False), ("prefill", True)])
def test_a_decode_worker_is_not_ready_before_it_gets_requests(role: str, ready: bool) -> None:
    """Kubernetes would end the old pod while frontends send nothing to the new one."""
    why = "self_check_pending"
    service: Any = SimpleNamespace(checking=lambda: why, reasons=list, told=dict)
    options = WorkerOptions(model="m")
    worker: Any = Worker([], "w-1", ClusterRef("n", "e", "q"), options)
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
    async def serve() -> int:
        raise kind("no good")

    codes: list[int] = []
    monkeypatch.setenv(log.DEBUG_ENV, debug)
    monkeypatch.setattr(process, "leave", codes.append)
    monkeypatch.setattr(process.check, "require_version", lambda: "")
    await process._serve(serve)
    told = capsys.readouterr().err
    assert codes == [code]
    assert told.endswith("error: no good\n")
    assert ("in serve" in told) == bool(debug)
