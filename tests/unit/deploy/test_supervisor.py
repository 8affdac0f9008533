"""What `up` records, without starting anything."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from rich.console import Console

from pullfill.deploy import members, plan
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


class _Machine:
    """Stands for the children, and for etcd: a process is ready at the third look after its start.
    log: what happened, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.names: list[str] = []
        self._looks: dict[str, int] = {}
        self.cluster = SimpleNamespace(processes=[])

    def launch(self, spec: plan.ProcessSpec, note: str = "") -> None:
        self.log.append(f"start {spec.name}")
        self.names.append(spec.name)
        self._looks[str(spec.instance_id)] = 0

    def raise_if_dead(self, name: str) -> None:
        assert name in self.names, f"{name} does not run yet"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing was opened."""

    async def ready_instances(self) -> set[str]:
        ready = {name for name, looks in self._looks.items() if looks >= 2}
        self.log += [f"{name} ready" for name, looks in self._looks.items() if looks == 2]
        self._looks = {name: looks + 1 for name, looks in self._looks.items()}
        return ready


def _worker(name: str, after: str = "") -> plan.ProcessSpec:
    return plan.ProcessSpec(
        name=name, role="decode", argv=[], env={}, instance_id=name, after=after
    )


async def test_a_worker_starts_when_the_one_before_it_on_its_gpu_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(_: Supervisor) -> None:
        pass

    machine: Any = _Machine()
    specs = [_worker("a"), _worker("b"), _worker("c", "a"), _worker("d", "c")]
    monkeypatch.setattr(Supervisor, "_start_nats", nothing)
    monkeypatch.setattr(Supervisor, "_start_etcd", nothing)
    monkeypatch.setattr(members, "Members", lambda ref: machine)
    monkeypatch.setattr(plan, "worker_specs", lambda *_: specs)
    view = ProcessView(Console(file=io.StringIO()), "starting")
    supervisor = Supervisor(plan.UpOptions(model="org/m"), StateDir(tmp_path), view)
    supervisor._children = machine
    await supervisor._start_all()
    assert machine.log == [
        "start a", "start b", "a ready", "b ready", "start c", "c ready", "start d", "d ready",
    ]  # fmt: skip
