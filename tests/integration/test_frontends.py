"""Two frontend processes at one port, over fake decode workers and a real etcd."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.etcd import EtcdServer, free_ports
from tests.support.fake_decode import FakeDecode
from tests.support.frontend_http import (
    PATIENCE_S,
    Served,
    expected,
    frontend,
    workers,
)

Pair = tuple[str, Served, Served]
PROMPT = {"model": "m", "prompt": "hello", "max_tokens": 3}
HELD = 6
"""A worker pauses after so many tokens of an answer, until the test lets it go on."""


@pytest.fixture
def pair(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """The URL that both frontends share, and the frontends. They store responses."""
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
    (port,) = free_ports(1)
    flags = ("--port", str(port), "--own-port", "0")
    (tmp_path / "etcd").mkdir()
    with (
        EtcdServer(tmp_path / "etcd") as etcd,
        frontend(etcd, tmp_path / "one.log", model_path, *flags) as one,
        frontend(etcd, tmp_path / "two.log", model_path, *flags) as two,
    ):
        yield f"http://127.0.0.1:{port}", one, two


async def ask(url: str) -> str:
    """Send a prompt over a new connection. Return the id of the answer."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        answer = await http.post("/v1/completions", json=PROMPT)
        answer.raise_for_status()
        return str(answer.json()["id"])


async def found(url: str, request_id: str, header: dict[str, str] | None = None) -> int:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        return (await http.get(f"/pullfill/requests/{request_id}", headers=header)).status_code


async def soon_found(url: str, request_id: str) -> None:
    """The other frontend has one second to tell of its request. A busy machine may need more."""
    async with asyncio.timeout(PATIENCE_S):
        while (code := await found(url, request_id)) == 404:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert code == 200


async def test_either_continues_a_conversation_of_the_other(pair: Pair) -> None:
    """What reaches the worker is what one frontend makes of the same turns."""
    _, one, two = pair
    fake = FakeDecode("decode-1", model="m", max_model_len=512)
    async with workers(one, fake, seen_by=[two]), httpx.AsyncClient(timeout=PATIENCE_S) as http:

        async def talk(*urls: str) -> list[list[int] | None]:
            fake.added.clear()
            previous = None
            for url in urls:
                body = {"model": "m", "input": "go on", "max_output_tokens": 5}
                answer = await http.post(
                    f"{url}/v1/responses", json={**body, "previous_response_id": previous}
                )
                previous = answer.raise_for_status().json()["id"]
            return [request.prompt_token_ids for request in fake.added]

        assert await talk(one.url, two.url, one.url) == await talk(one.url, one.url, one.url)
        unknown = {"model": "m", "input": "go on", "previous_response_id": "resp_none"}
        assert (await http.post(f"{one.url}/v1/responses", json=unknown)).status_code == 404


@pytest.mark.essential
async def test_both_serve_one_port_and_explain_the_requests_of_both(pair: Pair) -> None:
    shared, one, two = pair
    fake = FakeDecode("decode-1", model="m", max_model_len=512)
    async with workers(one, fake, seen_by=[two]):
        ids = [await ask(shared) for _ in range(40)]
        own = {"x-pullfill-asked-by": "a test"}  # so a frontend answers from its own records
        mine = [[await found(f.url, i, own) for i in ids] for f in (one, two)]
        assert all(sorted(codes) == [200, 404] for codes in zip(*mine, strict=True))
        assert all(200 in codes for codes in mine), "each frontend has served some of them"
        for url in (shared, one.url, two.url):
            for request_id in ids:
                await soon_found(url, request_id)
        assert await found(shared, "cmpl-unknown") == 404


async def test_the_other_serves_the_port_alone_when_one_is_killed(pair: Pair) -> None:
    shared, one, two = pair
    fake = FakeDecode("decode-1", model="m", max_model_len=512)
    async with workers(two, fake, seen_by=[one]):
        one.process.send_signal(signal.SIGKILL)
        one.process.wait(PATIENCE_S)
        for _ in range(20):
            await ask(shared)


async def streamed(url: str, tokens: int) -> tuple[str, str]:
    """Stream an answer. Return its id and its text."""
    body = {**PROMPT, "max_tokens": tokens, "stream": True}
    events: list[Any] = []
    async with (
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
    return events[0]["id"], "".join(event["choices"][0]["text"] for event in events)


async def test_what_a_worker_gives_back_another_one_serves(pair: Pair) -> None:
    """As a worker that drains, or whose intake is full. Neither frontend's client can tell."""
    _, one, two = pair
    full = FakeDecode("decode-1", model="m", max_model_len=512, migrate=True)
    free = FakeDecode("decode-2", model="m", max_model_len=512)
    async with workers(one, full, free, seen_by=[two]):
        while not full.added:
            for served in (one, two):
                _, text = await streamed(served.url, 40)
                assert text == expected(free.added[-1].prompt_token_ids or [], 40)


@pytest.mark.long
async def test_an_adapter_is_served_by_all_until_it_is_unloaded_at_one(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    fake = FakeDecode("decode-1", model="m", max_model_len=512)
    (tmp_path / "etcd").mkdir()
    with EtcdServer(tmp_path / "etcd") as etcd, ExitStack() as stack:

        def start(name: str, *flags: str) -> Served:
            flags = ("--port", "0", "--enable-lora", *flags)
            made = frontend(etcd, tmp_path / f"{name}.log", model_path, *flags)
            return stack.enter_context(made)

        async def change(served: Served, verb: str, name: str) -> int:
            body = {"lora_name": name, "lora_path": "/path"}
            return (await http.post(f"{served.url}/v1/{verb}_lora_adapter", json=body)).status_code

        async def code(served: Served, model: str) -> int:
            body = {**PROMPT, "model": model}
            return (await http.post(f"{served.url}/v1/completions", json=body)).status_code

        async def serves(served: Served, *names: str) -> None:
            async with asyncio.timeout(PATIENCE_S):
                listed = set[str]()
                while listed != {"m", *names}:
                    found = (await http.get(f"{served.url}/v1/models")).json()["data"]
                    listed = {one["id"] for one in found}

        one = await asyncio.to_thread(start, "one", "--lora-modules", "blue=/path")
        async with workers(one, fake) as http:
            assert await change(one, "load", "red") == 200
            two = await asyncio.to_thread(start, "two")
            await serves(two, "red", "blue")
            for name in ("red", "blue"):
                assert await code(two, name) == 200
                assert fake.added[-1].lora_request[0] == f"{name}@{fake.adapter}"
            assert await change(two, "load", "green") == 200
            assert await code(one, "green") == 200, "at once"
            assert (await change(one, "load", "green"), await code(one, "grey")) == (400, 404)
            assert await change(two, "unload", "red") == 200
            await serves(one, "blue", "green")
            assert await code(one, "red") == 404
            told = [args[0][0] for method, args in fake.utilities if method == "add_lora"]
            names = ("blue", "red", "green")
            assert sorted(told) == sorted([*names, *(f"{name}@{fake.adapter}" for name in names)])
