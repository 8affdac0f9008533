"""The stock vLLM servers of a frontend, and the layer that picks who gets each request.

    check → forwarding(options, …) at start → Layer(app, …) in front of vLLM's app

`router.stock_share` says which share of the requests the stock servers get: 0 none, 1 all. A side
that can take no request leaves all to the other one. So a fleet is moved over in steps, and back.
Without a flag that names stock servers nothing of this is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import aiohttp
from starlette.types import ASGIApp, Receive, Scope, Send

from pullfill.errors import ConfigError
from pullfill.frontend import counters
from pullfill.frontend.admission import ENGINE_PATHS, posted_to, replay, respond
from pullfill.frontend.dispatch import NO_WORKER
from pullfill.frontend.forward.protocols import protocol_of
from pullfill.frontend.forward.servers import Servers
from pullfill.frontend.forward.sources import ROLES, Heartbeats, bind_heartbeats, parse_list
from pullfill.frontend.forward.stock import ClientCall, Stock
from pullfill.frontend.request_log import RequestLog
from pullfill.options import ForwarderName, FrontendOptions
from pullfill.wire import ExplainRecord, RouterConfig, Timings

PATHS = frozenset({
    "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses",
    "/v1/messages",
})  # fmt: skip


def check(options: FrontendOptions) -> None:
    """Raise ConfigError if the flags for stock servers do not fit together, or cannot be used."""
    protocol = protocol_of(options.protocol)
    if options.forwarder is ForwarderName.PARALLEL and not protocol.parallel:
        raise ConfigError(
            f"--forwarder parallel cannot use the protocol {protocol.name}: its decode server "
            "needs what the prefill server returns; use staged"
        )
    parse_list(options.servers or "")
    if options.heartbeats is not None:
        bind_heartbeats(options.heartbeats, options.heartbeats_from).close()
    elif options.heartbeats_from:
        raise ConfigError("--heartbeats-from is for --heartbeats: give both, or neither")


@asynccontextmanager
async def forwarding(
    options: FrontendOptions,
    names: tuple[str, ...],
    settings: Callable[[], RouterConfig],
    key: str = "",
) -> AsyncIterator[Stock | None]:
    """Start what the options ask for. Ends with all servers forgotten and all connections closed.

    Gives None if they ask for no stock servers.

    names: the served model names. key: API key of the servers. Empty: they want none."""
    if not options.by_stock:
        yield None
        return
    protocol = protocol_of(options.protocol)
    session = aiohttp.ClientSession(
        # vLLM closes an idle connection after 5 s.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
        auto_decompress=False,
        trust_env=False,
        headers={"authorization": f"Bearer {key}"} if key else None,
    )
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(session)
        servers = Servers(session, names, options.model, protocol, lambda: settings().decode_policy)
        stack.push_async_callback(servers.close)
        for role in ROLES:
            for state in ("new", "ready", "failing", "refused"):
                counters.STOCK_SERVERS.labels(role, state).set_function(
                    partial(servers.count, role, state)
                )
        named = parse_list(options.servers or "")
        servers.set(named)
        if options.heartbeats is not None:
            heartbeats = Heartbeats(
                bind_heartbeats(options.heartbeats, options.heartbeats_from),
                options.heartbeats_from,
                lambda heard: servers.set((*named, *heard)),
            )
            stack.callback(heartbeats.socket.close)
            stack.callback(asyncio.create_task(heartbeats.run(), name="heartbeats").cancel)
        yield Stock(options.forwarder, servers, options.stock_silence_s)


@dataclass(slots=True, eq=False)
class Layer:
    """ASGI middleware that decides for each request: our decode workers, or a stock server.

    It stands between `Admission` and vLLM's app, and only if stock servers may be known. Requests
    on other paths than PATHS go to vLLM's app as before: it renders, tokenizes and lists models.

    app: vLLM's, over our decode workers. has_worker: returns whether one can take requests now.
    share: returns `router.stock_share`.
    requests: gets a record of each request that `stock` serves."""

    app: ASGIApp
    has_worker: Callable[[], bool]
    stock: Stock
    share: Callable[[], float]
    requests: RequestLog
    _due: float = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = posted_to(scope)
        if path not in PATHS or not self._by_stock():
            if path in ENGINE_PATHS and not self.has_worker():
                await respond(send, 503, NO_WORKER)
            else:
                await self.app(scope, receive, send)
            return
        body: bytes = (await receive())["body"]  # whole: see `replay`
        call = ClientCall.of(scope, path, body)
        if not self.stock.suits(call) and self.has_worker():
            # Decode workers get what stock servers cannot serve.
            await self.app(scope, replay(body, receive), send)
        else:
            try:
                await self.stock.forward(call, receive, send)
                call.record.answer_ms = call.ms()
            finally:
                self._tell(call)

    def trouble(self) -> str:
        """Return why neither side can take requests. Empty: one can."""
        return "" if self.has_worker() else self.stock.trouble()

    def _by_stock(self) -> bool:
        """Whether a stock server is to get the next request. Shares are kept exactly."""
        if not self.has_worker():
            return True
        if self.stock.trouble():
            return False
        self._due += self.share()
        if self._due < 1.0 - 1e-9:
            return False
        self._due -= 1.0
        return True

    def _tell(self, call: ClientCall) -> None:
        """Keep the record for `explain`, under the answer's id."""
        record = call.record
        last = {stage.stage: stage for stage in call.stages}
        prefill, decode = last.get("prefill"), last.get("decode")
        if prefill is not None and prefill.result != "ok":
            prefill = None
        spent = prefill.end_ms - prefill.begin_ms if prefill else None
        record.decode_choice = decode.choice if decode else None
        told = ExplainRecord(
            request_id=record.key,
            path=self.stock.name,
            reason=call.whole or "two_stages",
            prompt_tokens=record.prompt_tokens,
            remote_tokens=record.prompt_tokens if prefill else 0,
            decode_instance=decode.server if decode else "",
            prefill_instance=prefill.server if prefill else None,
            attempts=sum(stage.stage == "decode" for stage in call.stages),
            timings_ms=Timings(prefill=spent),
            stages=tuple(call.stages),
        )
        self.requests.begin(record).response_id = record.key
        self.requests.tell(record, told)
        self.requests.over(record)
