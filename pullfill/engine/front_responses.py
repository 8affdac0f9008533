"""Stored responses that other frontends ask for, so that any of them can continue a conversation.

With VLLM_ENABLE_RESPONSES_API_STORE vLLM keeps each response, and the messages that led to it, in
the process that made it. The `previous_response_id` of a request may name one of another frontend.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import TypeAdapter
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse

_READ = TypeAdapter(ResponsesResponse)
Ask = Callable[[str, str], Awaitable[bytes | None]]
"""Gets the id of a response and the client's Authorization header. Returns what `stored` of another
frontend returned. None: no frontend has it."""


def stored(handler: Any, response_id: str) -> bytes | None:
    """Return a response and its messages as JSON. None: it is not stored here.

    handler: vLLM's OpenAIServingResponses. Messages of gpt-oss are of another kind: None."""
    response = handler.response_store.get(response_id)
    if response is None or handler.use_harmony:
        return None
    told = {
        "response": response.model_dump(mode="json", by_alias=True),
        "messages": handler.msg_store.get(response_id),
    }
    # Messages are dicts or objects of OpenAI's client.
    return json.dumps(told, default=lambda item: item.model_dump(mode="json")).encode()


def share(handler: Any, ask: Ask) -> None:
    """Make the handler take a previous response from another frontend if it does not have it."""
    create = handler.create_responses

    async def created(request: Any, raw_request: Any = None) -> Any:
        name = request.previous_response_id
        if name and handler.enable_store and name not in handler.response_store:
            headers = {} if raw_request is None else raw_request.headers
            if told := await ask(name, headers.get("authorization", "")):
                found = json.loads(told)
                handler.msg_store[name] = found["messages"]
                handler.response_store[name] = _READ.validate_python(found["response"])
        return await create(request, raw_request)

    handler.create_responses = created
