"""A real frontend process in front of scripted stock servers, and of decode workers beside them."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import httpx

from pullfill.registry import keys
from tests.support.etcd import EtcdServer
from tests.support.frontend_http import (
    NAMESPACE,
    PATIENCE_S,
    frontend,
    workers,
)
from tests.support.frontend_rig import FakeDecode, FakeStock, World, events
from tests.support.waiting import soon

BODY = {"model": "m", "prompt": "hello", "max_tokens": 3}


async def test_stock_servers_behind_a_frontend_and_back(model_path: Path, tmp_path: Path) -> None:
    world = World()
    prefill, decode = (FakeStock(world, root=str(model_path)) for _ in range(2))
    (tmp_path / "etcd").mkdir()
    async with prefill.running(), decode.running():
        servers = f"prefill={prefill.url},decode={decode.url}"
        flags = ("--port", "0", "--servers", servers)
        with EtcdServer(tmp_path / "etcd") as etcd:
            process = contextlib.ExitStack()
            served = await asyncio.to_thread(
                process.enter_context, frontend(etcd, tmp_path / "f.log", model_path, *flags)
            )
            try:
                async with httpx.AsyncClient(
                    base_url=served.url, timeout=PATIENCE_S, verify=False
                ) as http:

                    async def ready() -> dict[str, object]:
                        found: dict[str, object] = (await http.get("/ready")).json()
                        return found

                    both = {"prefill": 1, "decode": 1}
                    told = await soon(ready, good=lambda found: found["stock"] == both)
                    assert (told["ready"], told["degraded"], told["reasons"]) == (True, False, [])
                    got = await http.post(
                        "/v1/completions",
                        json=BODY | {"stream": True},
                        headers={"x-request-id": "r1"},
                    )
                    assert got.content == b"".join(events("r1", BODY))
                    # The record is written when the stream has ended, which its client sees first.
                    record: dict[str, Any] = {}
                    async with asyncio.timeout(PATIENCE_S):
                        while "path" not in record:
                            await asyncio.sleep(0.05)
                            record = (await http.get("/pullfill/requests/cmpl-r1")).json()
                    assert (record["path"], record["decode_instance"]) == ("staged", decode.url)
                    assert [s["stage"] for s in record["stages"]] == ["prefill", "decode"]
                    models = (await http.get("/v1/models")).json()["data"]
                    assert [model["id"] for model in models] == ["m"]
                    status = (await http.get("/pullfill/status")).json()["stock"]
                    assert [row["state"] for row in status] == ["ready", "ready"]
                    fake = FakeDecode("decode-1")
                    async with workers(served, fake):
                        put = '{"decode_policy":"round_robin","stock_share":0.0}'
                        etcd.ctl("put", keys.config(NAMESPACE, "router"), put)
                        before = len(decode.requests)

                        async def pulled() -> bool:
                            got = await http.post("/v1/completions", json=BODY)
                            assert got.status_code == 200, got.text
                            return len(decode.requests) == before

                        async with asyncio.timeout(PATIENCE_S):
                            while not await pulled():
                                before = len(decode.requests)
                    assert (await http.post("/v1/completions", json=BODY)).status_code == 200
                    await soon(lambda: len(decode.requests) == before + 1)
            finally:
                await asyncio.to_thread(process.close)
