"""What `pullfill drain` and `pullfill page` say and do, with one real etcd."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from pullfill.config import ClusterRef, pod_name
from pullfill.deploy import operate
from pullfill.registry.client import EtcdClient
from pullfill.snapshot import Explained, LiveSnapshot
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


COMMAND = (sys.executable, "-m", "pullfill", "page")
KEPT = Explained(
    request_id="cmpl-x-0-1234abcd", path="remote", reason="long_prompt", prompt_tokens=900,
    decode_instance="decode-1", state="answered", arrived_at=time.time() - 2.0, answer_ms=250.0,
    answer_tokens=8,
)  # fmt: skip


def worker(path: str, _: Mapping[str, str]) -> tuple[int, Any]:
    """Answer as a decode worker that has kept one request."""
    told = {"load": {"running": 1}} | {
        "/status?jobs&ended": {"ended": [msgspec.to_builtins(KEPT)]},
        "/status?request=cmpl-x": {"request": msgspec.to_builtins(KEPT)},
    }.get(path, {})
    return 200, told


@asynccontextmanager
async def page(etcd: str, ns: str, *words: str) -> AsyncIterator[tuple[Any, list[str]]]:
    """The process, and the lines that it has written until it serves."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "--etcd", etcd, "--namespace", ns, *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        lines = [(await asyncio.wait_for(process.stdout.readline(), 30)).decode()]
        yield process, lines
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_it_serves_what_the_workers_tell_to_administrators_only(
    client: EtcdClient, etcd: EtcdServer, ns: str
) -> None:
    with serving(worker) as url:
        decode = member(client, ns, "decode-1", ttl_s=10, changes={"http": url, "model": "llama"})
        await decode.join()
        async with (
            page(etcd.url, ns) as (process, lines),
            httpx.AsyncClient(trust_env=False, timeout=20.0) as http,
        ):
            (at,) = re.findall(r"live page: (http://127\.0\.0\.1:\d+/pullfill/ui) ", lines[0])
            assert "<title>pullfill</title>" in (await http.get(at)).text
            for header in ({"x-forwarded-for": "10.0.0.9"}, {"host": "evil.example"}):
                assert (await http.get(f"{at}/events", headers=header)).status_code == 403
            assert (await http.get(f"{at}/requests/cmpl-x")).json()["reason"] == "long_prompt"
            unknown = await http.get(f"{at}/requests/nobody")
            assert unknown.status_code == 404
            assert "no decode worker has kept" in unknown.json()["error"]["message"]
            async with http.stream("GET", f"{at}/events") as events:
                told = (line async for line in events.aiter_lines() if line.startswith("data: "))
                seen = msgspec.json.decode((await anext(told))[6:], type=LiveSnapshot)
                assert (seen.frontend, seen.model) == ("", "llama")
                (row,) = seen.ended
                assert (row.id, row.total_ms, row.made) == (KEPT.request_id, 250.0, 8)
                again = msgspec.json.decode((await anext(told))[6:], type=LiveSnapshot)
                assert again.ended == seen.ended
                # It does not wait for those who look.
                process.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(process.wait(), 10) == 0
        await decode.leave()


async def test_where_nothing_is_it_says_what_to_do(etcd: EtcdServer, ns: str) -> None:
    async with page(etcd.url, ns) as (process, _):
        told = (await asyncio.wait_for(process.stdout.readline(), 10)).decode()
        assert told.startswith(f"no worker is in namespace {ns} yet: start one")
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 10) == 0
    async with page("http://127.0.0.1:1", ns) as (process, lines):
        assert lines == [""]
        (said,) = (await process.stderr.read()).decode().splitlines()
        assert "etcd at http://127.0.0.1:1 did not answer" in said
        assert "name another with --etcd" in said
        assert await process.wait() == 1
