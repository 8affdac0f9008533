"""A server that streams completions as vLLM's does, or goes wrong in a chosen way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tests.support.listening import listening

Step = bytes | float
"""Bytes to write, or seconds to wait. b"" breaks the connection off."""
Script = Callable[[dict[str, Any]], Sequence[Step]]

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(payload), payload)


def event(value: dict[str, Any] | str) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value)
    return f"data: {text}\n\n".encode()


def token_event(body: dict[str, Any], *tokens: int) -> bytes:
    choice: dict[str, Any] = {"index": 0, "text": "x" * len(tokens)}
    if body.get("return_token_ids"):
        choice["token_ids"] = list(tokens)
    return event({"id": "cmpl-1", "choices": [choice]})


def usage_event(body: dict[str, Any], cached: int = 0, tokens: int | None = None) -> bytes:
    usage = {
        "prompt_tokens": len(body["prompt"]),
        "completion_tokens": body["max_tokens"] if tokens is None else tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return event({"id": "cmpl-1", "choices": [], "usage": usage})


def whole(body: dict[str, Any]) -> list[Step]:
    """Every token in an event of its own; nothing goes wrong."""
    tokens = [chunk(token_event(body, n)) for n in range(body["max_tokens"])]
    return [HEAD, *tokens, chunk(usage_event(body)), chunk(event("[DONE]")), END]


class SseServer:
    """bodies: of the requests so far, in order."""

    def __init__(self, script: Script = whole) -> None:
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[SseServer]:
        async with listening(self._serve) as (host, port):
            self.url = f"http://{host}:{port}"
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            body = json.loads(await reader.readexactly(length))
            self.bodies.append(body)
            for step in self.script(body):
                if isinstance(step, float):
                    await asyncio.sleep(step)
                elif step:
                    writer.write(step)
                    await writer.drain()
                else:
                    break
        except ConnectionError:
            pass
        finally:
            writer.close()
