"""The parts of a decode worker that stand before its engine and its servers do."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.config import ClusterRef
from pullfill.decode_worker import worker
from pullfill.options import WorkerOptions
from pullfill.wire import RouterConfig


async def test_the_engine_may_look_at_settings_before_etcd_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine loads beside the connection to etcd, and its loop begins when it has loaded."""
    stored = RouterConfig(max_prefill_queue_size=3)

    class Stored(SimpleNamespace):
        async def start(self) -> Stored:
            return self

        async def close(self) -> None:
            pass

    async def started(etcd: Any, namespace: str) -> Stored:
        return Stored()

    monkeypatch.setattr(worker, "Settings", lambda *_: Stored(current=stored))
    monkeypatch.setattr(worker.SelfChecks, "started", started)
    role = worker.DecodeRole(ClusterRef("n", "", ""), WorkerOptions(model="m"))
    host: Any = SimpleNamespace(wake=None)
    context = role.make_context(host, files=SimpleNamespace())  # type: ignore[arg-type]
    assert context.router_config() == RouterConfig()
    async with AsyncExitStack() as parts:
        await role.watch(SimpleNamespace(), parts)  # type: ignore[arg-type]
        assert context.router_config() is stored


async def test_a_stuck_engine_that_goes_on_does_not_end_a_drain() -> None:
    outlook = SimpleNamespace(draining=False)
    ledger = SimpleNamespace(give_up_all=lambda *_, **__: None)

    async def call(work: Any, until: Any) -> None:
        pass

    host = SimpleNamespace(submit=lambda _: None, call=call)
    parts: Any = SimpleNamespace(
        host=host, context=SimpleNamespace(ledger=ledger), leases=None, dead=None,
        server=SimpleNamespace(dismiss=bool), blocks=None, meter=None,
    )  # fmt: skip
    service = worker.DecodeService(parts, parts, parts, outlook, "", parts, bool)  # type: ignore[arg-type]
    said = []
    for stuck in (True, False):
        service.engine_stuck(stuck)
        said.append(outlook.draining)
    await service.stop_taking()
    for stuck in (True, False):
        service.engine_stuck(stuck)
        said.append(outlook.draining)
    assert said == [True, False, True, True]
    await service.resume()
    service.engine_stuck(False)
    assert not outlook.draining
