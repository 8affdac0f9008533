"""The address that the frontend listens on, and what vLLM's flags change in its HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from argparse import Namespace
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from pullfill.deploy.local_servers import free_port
from pullfill.errors import ConfigError
from pullfill.frontend import main
from pullfill.frontend.main import bind, listeners_of, url_of
from pullfill.options import FrontendOptions


def test_a_taken_port_is_one_clear_line() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*--port"):
            bind("127.0.0.1", port)


def test_two_frontends_that_start_together_cannot_share_a_port() -> None:
    with bind("127.0.0.1", 0) as first:
        where = f"127.0.0.1:{first.getsockname()[1]}"
        assert (url_of(first, tls=False), url_of(first, tls=True)) == (
            f"http://{where}",
            f"https://{where}",
        )
        with pytest.raises(ConfigError):
            bind("127.0.0.1", first.getsockname()[1])


def test_frontends_that_share_a_port_get_connections_only_once_they_listen() -> None:
    with bind("127.0.0.1", 0) as own:
        with pytest.raises(ConfigError):
            bind("127.0.0.1", own.getsockname()[1], shared=True)
    with bind("127.0.0.1", 0, shared=True) as one:
        port = one.getsockname()[1]
        with bind("127.0.0.1", port, shared=True) as two:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
            two.listen()
            two.settimeout(5.0)
            for _ in range(20):
                with socket.create_connection(("127.0.0.1", port)), two.accept()[0]:
                    pass


def test_a_port_to_share_has_a_number() -> None:
    with pytest.raises(ConfigError, match="--own-port"):
        listeners_of(FrontendOptions(port=0, own_port=0))


class Leaving:
    """A frontend process that is told to leave while a client reads a stream.

    grace_s, drain_s: its flags. ready: whether a decode worker is there.
    failed: set when the answers that are left are ended with an error."""

    def __init__(self, grace_s: float, drain_s: float, ready: bool = True) -> None:
        options = FrontendOptions(
            port=free_port(), own_port=0, drain_timeout_s=drain_s, ready_grace_s=grace_s
        )
        self.listeners = listeners_of(options)
        self.ports = [listener.getsockname()[1] for listener in self.listeners]
        self.failed, self.draining = asyncio.Event(), asyncio.Event()
        self.started = asyncio.Event()
        self._frontend = main._Frontend(None, options, [], self.listeners)  # type: ignore[arg-type]
        self.stop = self._frontend._stop
        args = Namespace(
            uvicorn_log_level="error", disable_uvicorn_access_log=True, ssl_keyfile=None,
            ssl_certfile=None, ssl_ca_certs=None, ssl_cert_reqs=0, ssl_ciphers="TLSv1",
        )  # fmt: skip
        admin: Any = SimpleNamespace(can_serve=lambda: ready, drain=self.draining.set)
        member: Any = SimpleNamespace(revoked=asyncio.Event(), note_state=lambda _: None)
        self.ended = asyncio.create_task(
            self._frontend._http(
                self,  # type: ignore[arg-type]
                SimpleNamespace(args=args, names=["m"]),
                admin,
                member,
                self.failed.set,
            )
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return self.started.set()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/stream":
            await send({"type": "http.response.body", "body": b"first\n", "more_body": True})
            await self.failed.wait()
        await send({"type": "http.response.body", "body": b"last\n"})

    async def ask(self) -> str:
        """Send a request on a connection of its own. Returns the body. Empty: nobody listens."""
        found = ""
        for port in self.ports:
            with contextlib.suppress(httpx.ConnectError):
                async with httpx.AsyncClient(timeout=20) as http:
                    found += (await http.get(f"http://127.0.0.1:{port}/")).text
        return found

    @contextlib.asynccontextmanager
    async def streaming(self) -> AsyncIterator[AsyncIterator[str]]:
        """A stream, of which the first line has been read."""
        await asyncio.wait_for(self.started.wait(), 20)
        url = f"http://127.0.0.1:{self.ports[0]}/stream"
        async with httpx.AsyncClient(timeout=20) as http, http.stream("GET", url) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == "first"
            yield lines


@pytest.fixture
def stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the test does not end."""
    monkeypatch.setattr(main, "exit_within", lambda *_: None)
    monkeypatch.setattr(main.environment, "end_imports", lambda: None)


async def test_a_leaving_frontend_serves_until_load_balancers_know(stays: None) -> None:
    it = Leaving(grace_s=60.0, drain_s=60.0)
    async with it.streaming() as stream:
        it.stop.drain.set()
        await asyncio.wait_for(it.draining.wait(), 20)
        assert await it.ask() == "last\nlast\n", "at both ports"
        assert not it.failed.is_set()
        it.stop.force.set()  # a second SIGTERM
        assert [line async for line in stream] == ["last"], "the client is told"
    assert await asyncio.wait_for(it.ended, 20) == 0


async def test_a_leaving_frontend_closes_its_ports_before_its_streams_end(stays: None) -> None:
    it = Leaving(grace_s=0.05, drain_s=60.0)
    async with it.streaming() as stream:
        it.stop.drain.set()
        async with asyncio.timeout(20):
            while await it.ask():
                pass
        assert not it.failed.is_set(), "ports are open for the grace, not for the drain"
        it.stop.force.set()
        assert [line async for line in stream] == ["last"]
    assert await asyncio.wait_for(it.ended, 20) == 0


async def test_a_frontend_without_workers_leaves_at_once(stays: None) -> None:
    it = Leaving(grace_s=60.0, drain_s=60.0, ready=False)
    await asyncio.wait_for(it.started.wait(), 20)
    it.stop.drain.set()
    assert await asyncio.wait_for(it.ended, 20) == 0
