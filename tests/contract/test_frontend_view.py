"""A frontend's picture of the cluster, from real HTTP servers that answer, count and hang."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pullfill.cluster_status import UNTOLD
from pullfill.frontend import cluster
from pullfill.frontend.cluster import ClusterView
from pullfill.net import http_proof
from pullfill.runtime.health import Health
from pullfill.runtime.probe import ProbeServer
from pullfill.wire import WorkerRecord
from tests.support.http_stub import serving
from tests.support.listening import listening
from tests.support.workers import record

AWAY = {"up": False, "since_s": 5.0, "error": "nats://h:1: refused"}


class Known:
    """A directory that etcd has just confirmed."""

    age_s = 0.0

    def __init__(self, *records: WorkerRecord) -> None:
        self.records = records

    def workers(self, role: str) -> dict[str, WorkerRecord]:
        return {r.instance_id: r for r in self.records if r.role == role}


@asynccontextmanager
async def viewed(*urls: str) -> AsyncIterator[ClusterView]:
    known = Known(*(record(f"decode-{n}", http=url) for n, url in enumerate(urls)))
    async with viewing(known) as view:
        yield view


@asynccontextmanager
async def viewing(known: Known) -> AsyncIterator[ClusterView]:
    etcd = Health("etcd", "http://h:2")
    etcd.ok()
    view = ClusterView(known, etcd)
    try:
        yield view
    finally:
        await view.close()


@asynccontextmanager
async def answering(said: dict[str, Any]) -> AsyncIterator[tuple[str, list[int]]]:
    """The URL of a worker that answers, and a count of its requests."""
    asked: list[int] = []

    def status() -> dict[str, Any]:
        asked.append(1)
        return said

    probe = ProbeServer("127.0.0.1", lambda: (True, {}), status)
    await probe.start()
    try:
        yield probe.url, asked
    finally:
        await probe.stop()


@asynccontextmanager
async def hanging() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """The URL of a worker that hangs, and whether a client has given up."""
    given_up = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        given_up.set()
        writer.close()

    async with listening(hold) as (host, port):
        yield f"http://{host}:{port}", given_up


async def test_a_worker_that_hangs_does_not_hold_up_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """A readiness probe gives up after a second, so one hanging worker must not delay the
    answer."""
    monkeypatch.setattr(cluster, "READY_S", 0.2)
    monkeypatch.setattr(cluster, "FETCH_TIMEOUT_S", 0.6)
    said = {"load": {}, "servers": {"nats": AWAY}}
    async with hanging() as (stopped, given_up), answering(said) as (url, _):
        async with viewed(stopped, url) as view:
            reasons = await view.reasons()
            assert not given_up.is_set(), "it has longer than that to answer"
            assert reasons == ["NATS unreachable for 5 s: nats://h:1: refused"]
            rows = (await view.status())["workers"]
            assert [row["state"] for row in rows] == ["lost", "ready"]


async def test_a_worker_that_joins_while_others_are_asked_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "FETCH_TIMEOUT_S", 0.3)
    async with hanging() as (stopped, _), answering({"load": {}}) as (url, _asked):
        known = Known(record("decode-0", http=stopped))
        async with viewing(known) as view:
            looking = asyncio.create_task(view.status())
            await asyncio.sleep(0.05)
            known.records += (record("decode-1", http=url),)
            states = {r["instance_id"]: r["state"] for r in (await looking)["workers"]}
            assert states == {"decode-0": "lost"}
            rows = (await view.status())["workers"]
            assert [row["state"] for row in rows] == ["lost", "ready"]


async def test_questions_at_once_cost_each_worker_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with answering({"load": {}}) as (url, asked), viewed(url) as view:
        await asyncio.gather(*(view.reasons() for _ in range(5)), *(view.status() for _ in "ab"))
        assert len(asked) == 1
        await view.reasons()
        assert len(asked) == 1, "an answer counts for a moment"
        monkeypatch.setattr(cluster, "AGAIN_S", 0.0)
        monkeypatch.setattr(cluster, "ASKED_PER_S", 0.001)
        await view.reasons()
        assert len(asked) == 1, "as seldom as a large fleet"
        monkeypatch.setattr(cluster, "ASKED_PER_S", math.inf)
        await view.reasons()
        assert len(asked) == 2


async def test_what_a_worker_said_long_ago_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "AGAIN_S", 0.0)
    monkeypatch.setattr(cluster, "ASKED_PER_S", math.inf)
    monkeypatch.setattr(cluster, "READY_S", 0.1)
    said = {"load": {}, "servers": {"nats": AWAY}}
    async with answering(said) as (url, _), viewed(url) as view:
        assert await view.reasons()
    async with viewed(url) as gone:
        gone._last = view._last
        assert await gone.reasons(), "it may only be slow"
        monkeypatch.setattr(cluster, "FRESH_S", 0.0)
        assert await gone.reasons() == [f"NATS {UNTOLD}"]


async def test_workers_that_hang_hide_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The HTTP client had 100 connections. A worker that waited for one was shown as lost, too."""
    monkeypatch.setattr(cluster, "FETCH_TIMEOUT_S", 2.0)
    async with hanging() as (stopped, _), answering({"load": {}}) as (url, _asked):
        async with viewed(*[stopped] * 99, url, *[stopped] * 21) as view:  # 99 sorts last
            rows = (await view.status())["workers"]
            assert [row["state"] for row in rows if row["http"] == url] == ["ready"]


async def test_a_frontend_that_etcd_names_gets_the_proof_of_the_clients_key_only() -> None:
    """Whoever may write to etcd can announce one, and would collect keys."""
    key, route = "client-key-0123456789", "/pullfill/requests/cmpl-ä/1"
    seen: list[dict[str, str]] = []

    def tell(_: str, headers: Mapping[str, str]) -> tuple[int, Any]:
        seen.append({name.lower(): value for name, value in headers.items()})
        return 200, {"request_id": "cmpl-ä/1"}

    with serving(tell) as url:
        async with viewing(Known(record("frontend-1", http=url))) as view:
            for header in (f"Bearer {key}", "", "Basic x"):
                told = await view.record_elsewhere("cmpl-ä/1", header)
                assert json.loads(told or b"") == {"request_id": "cmpl-ä/1"}
    for headers in seen:
        assert "authorization" not in headers
        assert key not in str(headers)
    proofs = [headers.get(http_proof.HEADER, "").encode() for headers in seen]
    known = [http_proof.digest(key.encode())]
    assert [http_proof.proven(p, route, known, time.time()) for p in proofs] == [True, False, False]
