"""What `pullfill drain` says and does, with one real etcd."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pullfill.config import ClusterRef, pod_name
from pullfill.deploy import operate
from pullfill.registry.client import EtcdClient
from tests.support.etcd import EtcdServer
from tests.support.http_stub import serving
from tests.support.workers import member

POD = "demo-decode-5d9c7-x2x4z"


@pytest.mark.parametrize(
    ("told", "wait"), [({}, False), ({"pod": POD}, False), ({"pod": POD, "stays": True}, True)],
    ids=["host", "pod", "stock vLLM"],
)  # fmt: skip
async def test_drain_says_what_happens_next(
    client: EtcdClient, etcd: EtcdServer, ns: str, told: dict[str, Any], wait: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A Deployment starts the worker again: a line says how one becomes fewer for good. Stock vLLM
    stays, so nothing waits for its end."""
    with serving(lambda path, _: (200 if path == "/status" else 404, told)) as url:
        worker = member(client, ns, "decode-1", ttl_s=10, changes={"http": url})
        await worker.join()
        ref = ClusterRef(ns, etcd.url, "nats://")
        assert await operate.drain(ref, "decode-1", wait=wait, timeout_s=1.0) == 0
        await asyncio.wait_for(worker.revoked.wait(), 10)
        await worker.leave()
    *lines, last = capsys.readouterr().out.splitlines()
    if "stays" in told:
        assert not lines
        assert "serves its own clients until you end it" in last
        return
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
