"""A client of an ASGI app, without a server between them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Self


class Client:
    """One request. `say`: messages the app receives; it waits for more after them.

    sent: the messages that came. takes: while it is not set, the client takes nothing.
    more: further fields of the scope."""

    def __init__(
        self,
        app: Any,
        path: str = "/v1/completions",
        method: str = "POST",
        headers: Sequence[tuple[bytes, bytes]] = (),
        **more: Any,
    ) -> None:
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[dict[str, Any]] = []
        self.takes = asyncio.Event()
        self.takes.set()
        scope = {"type": "http", "method": method, "path": path, "headers": list(headers), **more}
        # As uvicorn does: a task, with a context of its own.
        self.task = asyncio.ensure_future(app(scope, self._inbox.get, self.take))

    async def take(self, message: Any) -> None:
        assert not self.whole
        await self.takes.wait()
        self.sent.append(message)

    async def ended(self) -> Self:
        await self.task
        return self

    def say(self, body: bytes = b"{}", more: bool = False) -> Self:
        self._inbox.put_nowait({"type": "http.request", "body": body, "more_body": more})
        return self

    def leave(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int:
        """Of HTTP, or the code that closed a websocket."""
        first = self.sent[0]
        status: int = first["status"] if "status" in first else first["code"]
        return status

    @property
    def parts(self) -> list[bytes]:
        """The pieces of the body as they came."""
        return [message.get("body", b"") for message in self.sent[1:]]

    @property
    def whole(self) -> bool:
        return len(self.sent) > 1 and not self.sent[-1].get("more_body", False)

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> str:
        """Of an error."""
        text: str = self.json["error"]["message"]
        return text

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])
