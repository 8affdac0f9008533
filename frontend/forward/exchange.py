"""The answer of a stock server as it is passed on to the client, and how a request there fails.

Bytes of a stream go on unchanged and at once, but only up to the end of an event. So if the server
breaks off in the middle of one, the client gets whole events, then vLLM's error event and `[DONE]`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import aiohttp
from starlette.types import Send

from pullfill.frontend.admission import error_of, respond, send_json
from pullfill.frontend.forward.servers import Server
from pullfill.frontend.request_log import error_in

_NOT_BACK = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "date", "server", "trailer"}
)
# The end of an event.
END = b"\n\n"


@dataclass(eq=False)
class StageFailed(Exception):
    """A server has not answered as it must.

    server: the server. None: there is none.
    again: whether another server may do better.
    lost: it could not be reached, or broke off. Then it gets no more requests for now.
    unsent: it has not got the request.
    status, body: its answer, if it is one of vLLM's errors. status is 504 if it was too slow."""

    server: Server | None
    why: str
    again: bool = True
    lost: bool = False
    unsent: bool = False
    status: int = 0
    body: bytes = b""


@dataclass(slots=True)
class Answer:
    """An answer whose head and first bytes have come.

    status: that of the error, if the first event of a stream is one of vLLM's of 500 or more.
    first: its first bytes; all of it unless `events`. events: it is a stream of events."""

    server: Server
    response: aiohttp.ClientResponse
    status: int
    first: bytes
    events: bool

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers for the client."""
        return [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in self.response.headers.items()
            if name.lower() not in _NOT_BACK
        ]

    async def blocks(self, silence_s: float) -> AsyncGenerator[bytes, None]:
        """Yield the answer as it comes, in blocks of whole events. Raises StageFailed if it breaks
        off. What came of an event is dropped then."""
        held = self.first
        self.server.streams += 1
        try:
            while self.events:
                if (end := held.rfind(END) + len(END)) >= len(END):
                    yield held[:end]
                    held = held[end:]
                # Not around `yield`: there the caller waits for its client.
                async with self.server.watched():
                    chunk = await self.response.content.readany()
                if not chunk:
                    break
                held += chunk
            if held or not self.events:
                yield held
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise failure(self.server, exc, silence_s) from exc
        finally:
            self.server.streams -= 1


def failure(
    server: Server, exc: Exception, silence_s: float, source: Server | None = None
) -> StageFailed:
    """Return what an exception of aiohttp or of `Server.watched` says of a server.

    source: the prefill server whose KV was to be read, if there is one."""
    who = f"{server.role} server {server.url}"
    if isinstance(exc, aiohttp.ServerTimeoutError) and not isinstance(
        exc, aiohttp.ConnectionTimeoutError
    ):
        # Never again: it may be a request that each server is too slow for.
        text = f"{who} sent nothing for {silence_s:g} s"
        return StageFailed(server, text, again=False, status=504)
    if isinstance(exc, TimeoutError) and not isinstance(exc, aiohttp.ClientError):
        if source is not None and source.state != "ready":
            who, server = f"{who} waits for KV, and prefill server {source.url}", source
        return StageFailed(server, f"{who} is {server.state}: {server.why}")
    text = str(exc) or type(exc).__name__
    if isinstance(exc, aiohttp.ClientPayloadError):
        text = "in the middle of its answer"
    unsent = isinstance(exc, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    what = "cannot be reached" if unsent else "broke off"
    why = f"{who} {what} ({text}): look whether it runs, and at its log"
    return StageFailed(server, why, lost=True, unsent=unsent)


def message_of(body: bytes) -> str:
    """Return the text of vLLM's error. Empty: it is none."""
    return str(error_in(body).get("message", ""))[:300]


# --------------------------------------------------------------------------- to the client


async def refuse(failed: StageFailed, send: Send) -> None:
    """Tell the client that it gets no answer. A server's own error is passed on with its status."""
    if failed.body and message_of(failed.body):
        await send_json(send, failed.status, failed.body)
    else:
        await respond(send, _status(failed), failed.why)


def _status(failed: StageFailed) -> int:
    return failed.status if failed.status in (400, 500, 504) else 503


def broken(failed: StageFailed, path: str) -> bytes:
    """Return the end of a stream that cannot go on, as vLLM writes it."""
    error = error_of(_status(failed), failed.why)
    if path == "/v1/messages":  # Anthropic's form
        told = {"type": "error", "error": {key: error[key] for key in ("type", "message")}}
        return b"event: error\ndata: " + json.dumps(told).encode() + b"\n\n"
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n"
