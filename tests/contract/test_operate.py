"""What operators' commands (`plan`, `drain`) write and say, with one real etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pullfill.config import ClusterRef, pod_name
from pullfill.deploy import operate, planner
from pullfill.deploy.planner import Plan, PlanMember, PlanSettings, PlanState
from pullfill.errors import UnavailableError
from pullfill.registry import keys
from pullfill.registry.client import EtcdClient
from pullfill.registry.directory import last_move
from pullfill.snapshot import Report
from pullfill.wire import RoleOrder, WorkerRole, decode
from tests.support.etcd import EtcdServer
from tests.support.http_stub import serving
from tests.support.workers import member

DECODES = ("decode-1", "decode-2")
NOW = PlanSettings(settle_s=0.0)


def row(instance_id: str, of: str, **load: Any) -> dict[str, Any]:
    load |= {"elastic": of} | ({"demand": {"prefill_demand": 0.2}} if of == "decode" else {})
    return {"instance_id": instance_id, "role": of, "state": "ready", "load": load}


@pytest.fixture
async def ref(
    client: EtcdClient, etcd: EtcdServer, ns: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ClusterRef]:
    """A cluster of two elastic decode workers, which no prefill worker helps."""
    members = [member(client, ns, name, ttl_s=10) for name in DECODES]
    for one in members:
        await one.join()
    told = {"workers": [row(name, "decode", requests=int(name[-1])) for name in DECODES]}
    monkeypatch.setattr(planner, "ask", lambda _: told)
    monkeypatch.setattr(operate, "ask_worker", lambda record: Report(load={"elastic": record.role}))
    yield ClusterRef(ns, etcd.url, "nats://")
    for one in members:
        await one.leave()


async def step(ref: ClusterRef) -> Plan:
    """One look of a planner that has just started."""
    return await asyncio.to_thread(planner.look, ref, NOW, PlanState(), apply=True)


async def test_a_move_is_an_order_to_the_worker(client: EtcdClient, ref: ClusterRef) -> None:
    found = await step(ref)
    assert found.move == PlanMember("decode-1", "decode", 1)
    ordered = await client.get(keys.role_order(ref.namespace, "decode-1"))
    assert decode(ordered.value, RoleOrder).role is WorkerRole.PREFILL
    assert await client.get(keys.role_order(ref.namespace, "decode-2")) is None
    last, revision = await last_move(client, ref.namespace)
    assert (last.instance_id, last.after) == ("decode-1", WorkerRole.PREFILL)
    again = await step(ref)
    assert (again.move, (await last_move(client, ref.namespace))[1]) == (None, revision)


@pytest.mark.essential
async def test_of_many_planners_one_orders(client: EtcdClient, ref: ClusterRef) -> None:
    plans = await asyncio.gather(*(step(ref) for _ in range(6)))
    assert sum(one.move is not None for one in plans) == 1
    kv = await client.get(keys.planner(ref.namespace))
    assert kv.create_revision == kv.mod_revision, "it was written once"


async def test_an_order_that_is_refused_costs_a_pause(
    client: EtcdClient, ref: ClusterRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operate, "ask_worker", lambda _: None)
    with pytest.raises(UnavailableError, match="does not answer"):
        await step(ref)
    assert await client.get(keys.role_order(ref.namespace, "decode-1")) is None
    assert not (await step(ref)).move


# --------------------------------------------------------------------------
# What `pullfill drain` says and does, with a real etcd.


POD = "demo-decode-5d9c7-x2x4z"


@pytest.mark.parametrize("told", [{}, {"pod": POD}], ids=["host", "pod"])
async def test_drain_says_what_kubernetes_does_next(
    client: EtcdClient, etcd: EtcdServer, ns: str, told: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The Deployment starts the worker again. The line says how one becomes fewer for good."""
    with serving(lambda path, _: (200 if path == "/status" else 404, told)) as url:
        worker = member(client, ns, "decode-1", ttl_s=10, changes={"http": url})
        await worker.join()
        ref = ClusterRef(ns, etcd.url, "nats://")
        assert await operate.drain(ref, "decode-1", wait=False, timeout_s=1.0) == 0
        await asyncio.wait_for(worker.revoked.wait(), 10)
        await worker.leave()
    *lines, last = capsys.readouterr().out.splitlines()
    assert last.endswith("it takes no new work and exits when its work is done")
    assert len(lines) == len(told)
    for line in lines:
        assert f"{POD}: its Deployment starts it again" in line
        assert f"kubectl annotate pod {POD} " in line


def test_a_process_knows_its_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("POD_NAME", POD)
    assert not pod_name()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert pod_name() == POD
    monkeypatch.delenv("POD_NAME")
    assert pod_name()
