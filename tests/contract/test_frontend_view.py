"""A frontend's picture of the cluster, from real HTTP servers that answer, count and hang."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pullfill.frontend.cluster_view import ClusterView
from pullfill.frontend.routes import Admin
from pullfill.frontend.routing.prefixes import Prefixes
from pullfill.net import http_proof
from pullfill.runtime import probe
from pullfill.runtime.health import ServerHealth
from pullfill.runtime.probe import ProbeServer
from pullfill.snapshot import UNTOLD
from tests.support.frontend_rig import FakeDecode, rig
from tests.support.http_stub import serving
from tests.support.listening import listening
from tests.support.waiting import soon
from tests.support.workers import FakeDirectory, record

AT_ONCE = {"again_s": 0.0, "most_asked": math.inf}
PATIENT = {"fetch_s": 60.0, "fresh_s": 60.0, "ready_s": 60.0}
"""A worker may take long to answer, as on a busy machine."""
AWAY = {"up": False, "since_s": 5.0, "error": "nats://h:1: refused"}


@asynccontextmanager
async def viewed(*urls: str, **times: float) -> AsyncIterator[ClusterView]:
    known = FakeDirectory(*(record(f"decode-{n}", http=url) for n, url in enumerate(urls)))
    async with viewing(known, **times) as view:
        yield view


@asynccontextmanager
async def viewing(known: Any, **times: float) -> AsyncIterator[ClusterView]:
    etcd = ServerHealth("etcd", "http://h:2")
    etcd.ok()
    view = ClusterView(known, etcd, "blue", **(PATIENT | times))
    try:
        yield view
    finally:
        await view.close()


@asynccontextmanager
async def answering(said: dict[str, Any]) -> AsyncIterator[str]:
    """The URL of a worker that answers."""
    probe = ProbeServer("127.0.0.1", lambda: (True, {}), lambda _: said)
    await probe.start()
    try:
        yield probe.url
    finally:
        await probe.stop()


@dataclass
class Hanging:
    """A worker that accepts connections and answers nothing until it has `ended`.

    given_up: a client has closed its connection."""

    url: str = ""
    given_up: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = asyncio.create_task(reader.read(-1))
        left.add_done_callback(lambda task: task.cancelled() or self.given_up.set())
        ended = asyncio.create_task(self.ended.wait())
        await asyncio.wait((left, ended), return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        ended.cancel()
        writer.close()


@asynccontextmanager
async def hanging() -> AsyncIterator[Hanging]:
    worker = Hanging()
    async with listening(worker.hold) as (host, port):
        worker.url = f"http://{host}:{port}"
        yield worker


async def test_a_worker_that_hangs_does_not_hold_up_ready() -> None:
    """A readiness probe gives up after a second, so one hanging worker must not delay the
    answer."""
    said = {"load": {}, "servers": {"nats": AWAY}}
    async with hanging() as stopped, answering(said) as url:
        async with viewed(stopped.url, url, ready_s=0.2, **AT_ONCE) as view:
            looking = asyncio.create_task(view.status())
            await soon(lambda: "decode-1" in view._last)
            reasons = await view.reasons()
            assert not looking.done(), "it has longer than that to answer"
            assert not stopped.given_up.is_set()
            assert reasons == ["NATS unreachable for 5 s: nats://h:1: refused"]
            stopped.ended.set()
            rows = (await looking).workers
            assert [row.state for row in rows] == ["lost", "ready"]


async def test_a_worker_that_hangs_is_lost() -> None:
    async with hanging() as stopped, viewed(stopped.url, fetch_s=0.1) as view:
        (row,) = (await view.status()).workers
        assert row.state == "lost"
        await asyncio.wait_for(stopped.given_up.wait(), 10)


async def test_what_a_worker_said_long_ago_is_not_repeated() -> None:
    said = {"load": {}, "servers": {"nats": AWAY}}
    known = FakeDirectory()
    async with viewing(known, **AT_ONCE) as view, viewing(known, fresh_s=0.0, **AT_ONCE) as strict:
        async with answering(said) as url:
            known.put(record("decode-0", http=url))
            assert await view.reasons()
            await strict.reasons()
        assert await view.reasons() == ["NATS unreachable for 5 s: nats://h:1: refused"], "slow?"
        assert await strict.reasons() == [f"NATS {UNTOLD}"]


async def test_workers_that_hang_hide_no_other() -> None:
    """The HTTP client had 100 connections. A worker that waited for one was shown as lost, too."""
    async with hanging() as stopped, answering({"load": {}}) as url:
        others = [stopped.url] * 99
        async with viewed(*others, url, *others[:21]) as view:  # 99 sorts last
            looking = asyncio.create_task(view.status())
            await soon(lambda: "decode-99" in view._last)
            stopped.ended.set()
            rows = (await looking).workers
            assert [row.state for row in rows if row.http == url] == ["ready"]


async def test_a_worker_whose_blocks_are_not_known_is_a_trouble_and_a_reason() -> None:
    async with (
        answering({"load": {}}) as url,
        rig(
            FakeDecode("decode-0", prefix_block_size=16), prefixes=Prefixes(9, missing_s=0.05)
        ) as r,
        viewed(url) as view,
    ):
        prefixes, loop, nothing = r.pool.prefixes, asyncio.get_running_loop(), SimpleNamespace()
        await soon(lambda: bool(prefixes.troubles(loop.time())))
        other: Any = nothing, r.pool, view, r.requests, list, nothing, r.pool.trouble
        admin = Admin(*other)
        asked: Any = nothing
        (row,) = json.loads((await admin.status(asked)).body)["workers"]
        ready = json.loads((await admin.ready(asked)).body)
    assert row["routing"]["prefix"]["state"] == "cold"
    assert [t for t in row["troubles"] if "its cached blocks are not known" in t]
    assert ready["ready"], "it is served like any other"
    assert ready["degraded"]
    assert [why for why in ready["reasons"] if why.startswith("decode-0: its cached blocks")]


async def test_a_frontend_that_etcd_names_gets_the_proof_of_the_clients_key_only() -> None:
    """Whoever may write to etcd can announce one, and would collect keys."""
    key, route = "client-key-0123456789", "/pullfill/requests/cmpl-ä/1"
    seen: list[dict[str, str]] = []

    def tell(_: str, headers: Mapping[str, str]) -> tuple[int, Any]:
        seen.append({name.lower(): value for name, value in headers.items()})
        return 200, {"request_id": "cmpl-ä/1"}

    with serving(tell) as url:
        async with viewing(FakeDirectory(record("frontend-1", http=url))) as view:
            for header in (f"Bearer {key}", "", "Basic x"):
                told = await view.record_elsewhere("cmpl-ä/1", header)
                assert json.loads(told or b"") == {"request_id": "cmpl-ä/1"}
    for headers in seen:
        assert "authorization" not in headers
        assert key not in str(headers)
    proofs = [headers.get(http_proof.HEADER, "").encode() for headers in seen]
    known = [http_proof.digest(key.encode())]
    assert [http_proof.proven(p, route, known, time.time()) for p in proofs] == [True, False, False]


PAGE = """# TYPE python_info gauge
python_info{version="3.11"} 1.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 2.0
# TYPE pullfill_queue_depth_jobs gauge
pullfill_queue_depth_jobs 4.0
"""


async def test_every_series_says_of_which_cluster_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of vLLM, Python and the workers, too: one Prometheus scrapes several clusters."""
    monkeypatch.setattr(probe, "generate_latest", lambda _: PAGE.encode())
    own = asyncio.sleep(0, PAGE)
    async with answering(UNTOLD) as url, viewed(url) as view:
        text = await view.metrics(own)
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    assert [s.labels.get("instance_id") for s in samples] == [None, "decode-0"] * 3
    assert {s.labels.get("pullfill_namespace") for s in samples} == {"blue"}
