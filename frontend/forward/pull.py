"""`--forwarder pull`: vLLM's app in this process, over pullfill's decode workers."""

from __future__ import annotations

from collections.abc import Callable

from pullfill.frontend.admission import App, Message, Receive, Send, respond
from pullfill.frontend.dispatch import NO_WORKER
from pullfill.frontend.forward.contract import Call


class Pull:
    """See the module.

    has_worker: returns whether a decode worker can take requests now."""

    name = "pull"

    def __init__(self, app: App, has_worker: Callable[[], bool]) -> None:
        self._app = app
        self._has_worker = has_worker

    def trouble(self) -> str:
        return "" if self._has_worker() else NO_WORKER

    def suits(self, call: Call) -> bool:
        return True

    async def forward(self, call: Call, receive: Receive, send: Send) -> None:
        if why := self.trouble():
            await respond(send, 503, why, "ServiceUnavailableError", retry_after_s=1)
            return
        told = False

        async def read() -> Message:
            nonlocal told
            if told:
                return await receive()
            told = True
            return {"type": "http.request", "body": call.body, "more_body": False}

        await self._app(call.scope, read, send)
