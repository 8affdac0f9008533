"""A stored response whose request fails. The streams themselves: test_frontend_http.py."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from pullfill.engine.blame import Fault
from tests.support.late import Late

front_patches: Any = Late("pullfill.engine.front_patches")
responses: Any = Late("vllm.entrypoints.openai.responses.serving")
messages: Any = Late("vllm.entrypoints.anthropic.serving")


async def test_a_response_in_the_background_fails_and_says_why() -> None:
    """vLLM leaves it queued for ever, and its stream too."""
    handler = responses.OpenAIServingResponses.__new__(responses.OpenAIServingResponses)
    told = front_patches.failure("decode-1 was lost", Fault.WORKERS)

    async def run(*_: Any) -> None:
        raise told

    first = SimpleNamespace(
        type="response.created", response=SimpleNamespace(model_dump=lambda **_: {"id": "resp_1"})
    )

    async def stream(*_: Any) -> Any:
        yield first
        raise told

    stored = SimpleNamespace(status="queued", error=None)
    handler.response_store, handler.event_store = {"resp_1": stored}, {}
    handler.responses_stream_generator, handler._run_background_request = stream, run
    anthropic = messages.AnthropicServingMessages.__new__(messages.AnthropicServingMessages)
    state = SimpleNamespace(openai_serving_responses=handler, anthropic_serving_messages=anthropic)
    front_patches.tell_failures(state, SimpleNamespace())
    request = SimpleNamespace(request_id="resp_1")
    await handler._run_background_request(request)
    want = {"code": "server_error", "message": "decode-1 was lost"}
    assert (stored.status, stored.error) == ("failed", want)
    await handler._run_background_request_stream(request)
    async with asyncio.timeout(5.0):
        events = [e async for e in handler.responses_background_stream_generator("resp_1")]
    assert [e.type for e in events] == ["response.created", "response.failed"]
    assert events[-1].response.error.message == "decode-1 was lost"
