"""CPU per request and per streamed token, with the real frontend: HTTP, SSE, both workers.

The units of Dynamo's figures for its mocker: all processes of frontend and both workers, engine
stand-ins included, under a closed loop of streams. Answers of two lengths, in turns: the slope is
the token's cost, what is left at length 0 the request's.
"""

from __future__ import annotations

import asyncio
import random

import httpx

from benchmarks import machine
from benchmarks.control.plant import Fleet, Plant, mock_flags
from benchmarks.live import CLI, BenchError, child, demo_vocabulary, wait_for
from benchmarks.report import Row, median, row, versus
from pullfill.deploy import local_servers
from tests.support import web

SHORT, LONG = 2, 66
PROMPT = 128
STREAMS = 24
STEP_S = 0.01
"""A step of the mock engine: all streams get their next token in it."""
DYNAMO = "Dynamo 1.6.1, its mocker (measured elsewhere)"
DYNAMO_REQUEST_MS, DYNAMO_TOKEN_US = 2.5, 16.0


async def _stream(client: httpx.AsyncClient, prompt: list[int], tokens: int) -> int:
    body = {
        "model": "demo", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True,
        "stream": True, "temperature": 0,
    }  # fmt: skip
    chunks = 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith('data: {"error"'):
                raise BenchError(f"a stream ended with an error: {line}")
            chunks += line.startswith("data: {")
    return chunks


async def _load(url: str, requests: int, tokens: int, seed: int) -> int:
    rng, vocabulary = random.Random(seed), demo_vocabulary()
    gate = asyncio.Semaphore(STREAMS)
    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=60.0, limits=limits) as client:

        async def one(prompt: list[int]) -> int:
            async with gate:
                return await _stream(client, prompt, tokens)

        prompts = [[rng.randrange(300, vocabulary) for _ in range(PROMPT)] for _ in range(requests)]
        return sum(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def run(plant: Plant, requests: int, rounds: int, quiet: machine.OtherLoad) -> list[Row]:
    """Rows beside Dynamo's. Raises BenchError."""
    settings = mock_flags(step_s=STEP_S)
    fleet = Fleet(
        plant, "tokens", 1, 1, decode_flags=settings, prefill_flags=mock_flags(), router={}
    )
    port = local_servers.free_port()
    command = [
        *CLI, "frontend", "--etcd", plant.etcd, "--nats", plant.nats, "--namespace", "tokens",
        "--model", plant.model, "--port", str(port), "--served-model-name=demo",
        "--dtype=float32", "--max-model-len=4096", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        with child(command, plant.base / "frontend.log") as process:
            wait_for(lambda: web.get(url + "/ready").is_success, 60.0, "the frontend is ready")
            _warm(url)
            found = {SHORT: [], LONG: []}  # type: dict[int, list[dict[str, float]]]
            ours = [fleet.front, *fleet.decode, *fleet.prefill, *plant.servers]
            for number in range(rounds):
                for tokens in (SHORT, LONG):
                    with quiet.window([process.pid, *ours]):
                        use = _window(fleet, process.pid, url, requests, tokens, number)
                    found[tokens].append(use)
    finally:
        fleet.close()
    return _rows(found)


def _warm(url: str) -> None:
    asyncio.run(_load(url, 2 * STREAMS, 8, 999))


def _window(
    fleet: Fleet, frontend: int, url: str, requests: int, tokens: int, seed: int
) -> dict[str, float]:
    """ms of CPU per request by part."""
    before = machine.cpu_seconds(frontend)
    with fleet.window() as used:
        asyncio.run(_load(url, requests, tokens, 10 * seed + tokens))
    front = machine.cpu_seconds(frontend) - before
    both = [used["decode"], used["prefill"]]
    per = 1e3 / requests
    return {
        "frontend": front * per,
        "workers": sum(u.total for u in both) * per,
        "engines": sum(u.engine for u in both) * per,
    }


def _rows(found: dict[int, list[dict[str, float]]]) -> list[Row]:
    def of(tokens: int, part: str) -> float:
        return median([use[part] for use in found[tokens]])

    def split(part: str) -> tuple[float, float]:
        """(ms per request, µs per token)."""
        token = (of(LONG, part) - of(SHORT, part)) / (LONG - SHORT)
        return of(SHORT, part) - SHORT * token, 1e3 * token

    parts = {part: split(part) for part in ("frontend", "workers", "engines")}
    request = parts["frontend"][0] + parts["workers"][0]
    token = parts["frontend"][1] + parts["workers"][1]
    rows = [
        versus("CPU per request, frontend and both workers", request, "ms", DYNAMO,
               DYNAMO_REQUEST_MS),
        versus("CPU per streamed token, frontend and both workers", token, "us", DYNAMO,
               DYNAMO_TOKEN_US),
    ]  # fmt: skip
    for name, (ms, us) in parts.items():
        rows.append(row(f"CPU per request, {name}", ms, "ms"))
        rows.append(row(f"CPU per streamed token, {name}", us, "us"))
    for one in rows:
        print(f"  {one.metric:<60} {one.value:>10} {one.unit} {one.peer} {one.peer_value or ''}")
    return rows
