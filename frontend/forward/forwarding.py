"""Puts the forwarders of a frontend together. Nothing is made with `--forwarder pull`.

Forwarding.of(options, …) → layer(app) for requests, ready/status for the frontend's routes → close
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from pullfill.errors import ConfigError
from pullfill.frontend import counters
from pullfill.frontend.admission import App
from pullfill.frontend.decode_pool import WorkerPool
from pullfill.frontend.forward.layer import Layer, Pull
from pullfill.frontend.forward.picker import Picker
from pullfill.frontend.forward.protocols import dispatch_of, protocol_of
from pullfill.frontend.forward.servers import Servers
from pullfill.frontend.forward.sources import (
    ROLES,
    Heartbeats,
    HeartbeatSocket,
    ServerFile,
    bind_heartbeats,
    parse_list,
    read_file,
)
from pullfill.frontend.forward.stock import Stock
from pullfill.frontend.request_log import RequestLog
from pullfill.options import ForwarderName, FrontendOptions
from pullfill.wire import RouterConfig


def check(options: FrontendOptions) -> None:
    """Raise ConfigError if the flags for stock servers do not fit together, or cannot be used."""
    protocol = protocol_of(options.protocol)
    if options.forwarder is not ForwarderName.PULL:
        dispatch_of(protocol, options.forwarder, options.dispatch)
        parse_list(options.servers or "")
        if options.servers_file is not None:
            read_file(options.servers_file)
        if options.heartbeats is not None:
            bind_heartbeats(options.heartbeats, options.heartbeats_from).close()
        elif options.heartbeats_from:
            raise ConfigError("--heartbeats-from is for --heartbeats: give both, or neither")
        return
    flags = {
        "--servers": options.servers,
        "--servers-file": options.servers_file,
        "--heartbeats": options.heartbeats,
        "--heartbeats-from": options.heartbeats_from or None,
        "--dispatch": options.dispatch,
    }
    for name, given in flags.items():
        if given is not None:
            raise ConfigError(f"{name} is for stock vLLM servers: add --forwarder staged or batch")


@dataclass(slots=True)
class Forwarding:
    """The stock servers of a frontend, and the forwarder that uses them. `close` it at the end."""

    servers: Servers
    stock: Stock
    heartbeats: Heartbeats
    _session: aiohttp.ClientSession
    file: ServerFile | None = None
    socket: HeartbeatSocket | None = None
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        options: FrontendOptions,
        names: Sequence[str],
        settings: Callable[[], RouterConfig],
        key: str = "",
    ) -> Forwarding | None:
        """Return what the options ask for, on the running loop. None: no stock servers.

        names: the served model names. key: API key of the servers. Empty: they want none."""
        if options.forwarder is ForwarderName.PULL:
            return None
        protocol = protocol_of(options.protocol)
        dispatch = dispatch_of(protocol, options.forwarder, options.dispatch)
        session = aiohttp.ClientSession(
            # vLLM closes an idle connection after 5 s.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
            auto_decompress=False,
            trust_env=False,
        )
        rng = random.Random()
        pickers = {role: Picker(lambda: settings().decode_policy, rng) for role in ROLES}
        headers = {"authorization": f"Bearer {key}"} if key else {}
        servers = Servers(session, names, options.model, protocol, pickers, headers)
        servers.set("--servers", parse_list(options.servers or ""))
        stock = Stock(
            options.forwarder, protocol, dispatch, servers, session, pickers,
            key=key, silence_s=options.stock_silence_s,
        )  # fmt: skip
        for role in ROLES:
            for state in ("new", "ready", "failing", "refused"):
                counters.STOCK_SERVERS.labels(role, state).set_function(
                    _counter(servers, role, state)
                )
        heartbeats = Heartbeats(
            lambda entries: servers.set("heartbeats", entries), options.heartbeat_silence_s
        )
        found = cls(servers, stock, heartbeats, session)
        found._start(heartbeats.run(), "heartbeats")
        if options.heartbeats is not None:
            found.socket = HeartbeatSocket(options.heartbeats, heartbeats, options.heartbeats_from)
            found._start(found.socket.run(), "heartbeat-socket")
        if options.servers_file is not None:
            found.file = ServerFile(
                options.servers_file, lambda entries: servers.set("--servers-file", entries)
            )
            found._start(found.file.run(), "servers-file")
        return found

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(asyncio.create_task(work, name=name))

    def troubles(self) -> list[str]:
        """Return a line for each server that takes no requests, and one for a broken file."""
        broken = [] if self.file is None or not self.file.trouble else [self.file.trouble]
        return [*self.servers.troubles(), *broken]

    def layer(
        self,
        app: App,
        pool: WorkerPool,
        share: Callable[[], float],
        requests: RequestLog,
    ) -> Layer:
        """Return the ASGI layer in front of vLLM's app."""
        pull = Pull(app, lambda: bool(pool.candidates()))
        return Layer(app, pull, self.stock, share, requests)

    async def close(self) -> None:
        """Forget the servers and close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.socket is not None:
            self.socket.close()
        await self.servers.close()
        await self._session.close()


def _counter(servers: Servers, role: str, state: str) -> Callable[[], float]:
    return lambda: float(sum(s.role == role and s.state == state for s in servers.known.values()))
