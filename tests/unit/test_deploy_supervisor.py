"""What `up` records, without starting anything."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from pullfill.deploy import plan
from pullfill.deploy.state import StateDir
from pullfill.deploy.supervisor import Supervisor
from pullfill.deploy.view import ProcessView


async def test_cluster_json_names_the_port_that_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start_all(_: Supervisor) -> None:
        pass

    monkeypatch.setattr(Supervisor, "_start_all", start_all)
    monkeypatch.setattr(Supervisor, "_catch_signals", lambda _: None)
    options, state = plan.UpOptions(port=0), StateDir(tmp_path)
    view = ProcessView(Console(file=io.StringIO()), "starting")
    await Supervisor(options, state, view).start()
    cluster = state.cluster()
    assert options.port != 0
    assert cluster is not None
    assert cluster.frontend_url == f"http://127.0.0.1:{options.port}"
