"""`pullfill up` starts a frontend without workers. Scripted stock vLLM servers answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.support.command_line import cluster, run
from tests.support.frontend_rig import FakeStock, World, until

BODY = {"model": "m", "prompt": "hello", "max_tokens": 3}


async def command(state: Path, *words: str) -> str:
    """Run a command to its end. Return what it prints."""
    done = await asyncio.to_thread(run, state, *words, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
async def test_up_needs_no_workers_of_its_own(state: Path, model_path: Path) -> None:
    world = World()
    prefill, decode = (FakeStock(world, root=str(model_path)) for _ in range(2))
    decode.alive = False
    async with prefill.running(), decode.running():
        told = await command(
            state, "up", "--detach", "--port", "0", "--decode", "0", "--prefill", "0",
            "--model", str(model_path), "--served-model-name", "m", "--forwarder", "staged",
            "--servers", f"prefill={prefill.url},decode={decode.url}",
        )  # fmt: skip
        try:
            line = f"no stock decode server is ready: {decode.url} is failing: /health does not"
            assert f"but not yet: {line}" in told
            assert "no decode worker" not in told
            assert "no prefill worker" not in told
            async with httpx.AsyncClient(base_url=cluster(state)["frontend_url"]) as http:
                refused = await http.post("/v1/completions", json=BODY)
                assert (refused.status_code, line in refused.text) == (503, True)
                decode.alive = True
                seen = decode.requests
                async with asyncio.timeout(20):
                    while (await http.get("/ready")).status_code != 200:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                got = await http.post("/v1/completions", json=BODY)
                assert got.status_code == 200
                await until(lambda: len(seen) == 1)
                told = await command(state, "explain", got.json()["id"])
            assert "served by stock vLLM servers: staged (reason: serial)" in told
            assert f"decode at {decode.url} (--servers)" in told
            assert decode.url in await command(state, "status")
        finally:
            await command(state, "down")
