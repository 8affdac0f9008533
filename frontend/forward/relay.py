"""Passes a server's answer on to the client.

Bytes of a stream go on unchanged and at once, but only up to the end of an event. So if the server
breaks off in the middle of one, the client gets whole events, then vLLM's error event and `[DONE]`.
"""

from __future__ import annotations

import json
from contextlib import aclosing

from pullfill.frontend.admission import Send, respond
from pullfill.frontend.forward.exchange import Exchange, StageFailed, message_of

_END = b"\n\n"
_KINDS = {
    400: "BadRequestError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}


async def relay(
    exchange: Exchange, send: Send, silence_s: float, path: str
) -> tuple[int, StageFailed | None]:
    """Send the answer. Returns how many events it had, about one for each token, and how it broke
    off, if it did.

    silence_s: longest silence of the server. path: of the request. Raises StageFailed if the server
    broke off and nothing has been sent yet."""
    head = {
        "type": "http.response.start",
        "status": exchange.status,
        "headers": exchange.headers(),
    }
    if not exchange.events:
        await send(head)
        await send({"type": "http.response.body", "body": exchange.first})
        return 1, None
    begun, events, held = False, 0, b""
    try:
        async with aclosing(exchange.rest(silence_s)) as rest:
            chunk: bytes | None = exchange.first
            while chunk is not None:
                held = held + chunk if held else chunk
                if (end := held.rfind(_END) + len(_END)) >= len(_END):
                    if not begun:
                        begun = True
                        await send(head)
                    out, held = held[:end], held[end:]
                    events += out.count(_END)
                    await send({"type": "http.response.body", "body": out, "more_body": True})
                chunk = await anext(rest, None)
    except StageFailed as exc:
        if not begun:
            raise
        await send({"type": "http.response.body", "body": broken(exc, path)})
        return events, exc
    if not begun:
        await send(head)
    await send({"type": "http.response.body", "body": held})
    return events, None


async def refuse(failed: StageFailed, send: Send) -> None:
    """Tell the client that it gets no answer. A server's own error is passed on with its status."""
    if failed.body and message_of(failed.body):
        length = b"%d" % len(failed.body)
        head = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": failed.status, "headers": head})
        await send({"type": "http.response.body", "body": failed.body})
        return
    status = _status(failed)
    retry = 1 if status == 503 else None
    await respond(send, status, failed.why, _KINDS[status], retry_after_s=retry)


def _status(failed: StageFailed) -> int:
    return failed.status if failed.status in _KINDS else 503


def broken(failed: StageFailed, path: str) -> bytes:
    """Return the end of a stream that cannot go on, as vLLM writes it."""
    code = _status(failed)
    error = {"message": failed.why, "type": _KINDS[code], "param": None, "code": code}
    if path == "/v1/messages":  # Anthropic's form
        told = {"type": "error", "error": {key: error[key] for key in ("type", "message")}}
        return b"event: error\ndata: " + json.dumps(told).encode() + b"\n\n"
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n"
