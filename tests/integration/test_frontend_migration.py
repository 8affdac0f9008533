"""Answers that lose their decode worker half-way, as a client of the real frontend sees them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.support.frontend_http import Served, expected, generated, taken, workers
from tests.support.frontend_rig import FakeDecode
from tests.support.waiting import soon

TOKENS = 40
HELD = 5
"""A worker pauses after so many tokens of an answer. Then the test takes it away."""
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@asynccontextmanager
async def pair(served: Served) -> AsyncIterator[tuple[httpx.AsyncClient, list[FakeDecode]]]:
    """Two workers that wait in the middle of an answer, so as to be lost there."""
    fakes = [
        FakeDecode(
            f"decode-{i}", model="m", max_model_len=512, step_s=0.01, cached_tokens=i + 1,
            stop_after=HELD,
        )
        for i in range(2)
    ]  # fmt: skip
    async with workers(served, *fakes) as http:
        yield http, fakes


def body_of(path: str, **more: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt": "hello"}
    if path == CHAT:
        prompt = {"messages": [{"role": "user", "content": "hello"}]}
    return {"model": "m", "max_tokens": TOKENS, "temperature": 0, **prompt, **more}


async def stream(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All events of a streamed answer, which must be complete."""
    events = []
    async with http.stream("POST", path, json={**body, "stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def text_of(event: dict[str, Any]) -> str:
    choice = event["choices"][0]
    return choice.get("text") or choice.get("delta", {}).get("content") or ""


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("how", ["die", "leave"])
@pytest.mark.essential
async def test_a_stream_goes_on_and_its_client_cannot_tell(
    served: Served, path: str, how: str
) -> None:
    async with pair(served) as (http, fakes):
        body = body_of(path, stream_options={"include_usage": True})
        before = await generated(http, served)
        call = asyncio.create_task(stream(http, path, body))
        await taken(http, served, before + HELD)
        first, other = sorted(fakes, key=lambda fake: not fake.added)
        other.stop_after = 0  # it goes on to the end
        await asyncio.to_thread(getattr(first, how))
        events = await call
        prompt = first.added[0].prompt_token_ids or []
        assert "".join(text_of(e) for e in events[:-1]) == expected(prompt, TOKENS)
        reasons = [e["choices"][0]["finish_reason"] for e in events[:-1]]
        assert [r for r in reasons if r] == ["length"]
        usage = events[-1]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), TOKENS)
        assert usage["prompt_tokens_details"]["cached_tokens"] == first.cached_tokens
        told = (await http.get(f"/pullfill/requests/{events[0]['id']}")).json()
        assert told["migrated_from"] == [first.instance_id]
        assert 0 < told["migrated_tokens"] < TOKENS


@pytest.mark.essential
async def test_a_stop_string_across_the_break_is_found(served: Served) -> None:
    """Its first letters come from one worker and its last from the other."""
    async with pair(served) as (http, fakes):
        for fake in fakes:
            fake.stop_after = 20  # tokens of an answer; then the worker waits
        prompt = (await http.post("/tokenize", json={"model": "m", "prompt": "hello"})).json()
        text = expected(prompt["tokens"], TOKENS)
        # Twice as many tokens: the other worker must not end the answer before it is aborted.
        body = body_of(COMPLETIONS, stop=[text[17:24]], max_tokens=2 * TOKENS)
        call = asyncio.create_task(stream(http, COMPLETIONS, body))
        await soon(lambda: any(a.sent == 20 for f in fakes for a in f.active))
        (first,) = [fake for fake in fakes if fake.added]
        first.leave()
        events = await call
        assert "".join(text_of(e) for e in events) == text[:17]
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        (other,) = [fake for fake in fakes if fake is not first]
        await soon(lambda: other.aborted == [other.added[0].request_id])


SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("more", "word", "streamed"),
    [
        ({"seed": 1, "temperature": 1.0}, "sampled with a seed", True),
        ({"n": 2, "temperature": 1.0}, "n > 1", False),
        ({"response_format": SCHEMA}, "structured output", True),
        ({"frequency_penalty": 0.5}, "frequency penalty", True),
    ],
)
@pytest.mark.essential
async def test_what_cannot_be_exact_says_so(
    served: Served, more: dict[str, Any], word: str, streamed: bool
) -> None:
    async with pair(served) as (http, fakes):
        body = body_of(CHAT, **more)
        before = await generated(http, served)
        request = stream(http, CHAT, body) if streamed else http.post(CHAT, json=body)
        call: asyncio.Task[Any] = asyncio.create_task(request)
        await taken(http, served, before + HELD * more.get("n", 1))
        first = next(fake for fake in fakes if fake.added)
        await asyncio.to_thread(first.die)
        answer = await call
        error = (answer[-1] if streamed else answer.json())["error"]
        assert error["code"] == 503
        assert f"{first.instance_id} was lost" in error["message"]
        assert "cannot continue it exactly" in error["message"]
        assert word in error["message"]
        assert streamed or answer.status_code == 503
        # What else there was of it has ended too.
        await soon(lambda: not any(fake.active for fake in fakes if fake is not first))
