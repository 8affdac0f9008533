"""The client of etcd: URLs, ranges, members that stand still, tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from pullfill.errors import ConfigError, RegistryUnavailable
from pullfill.net.security import ServerSecurity
from pullfill.registry.client import EtcdClient, parse_url, range_of

OLD = "etcdserver: revision of auth store is old"
HEADER = {"header": {"revision": "7"}}


class Member:
    """One member's JSON gateway. refuses: what it says to the next calls. hangs: it answers no
    call. says: the next line of a watch, after the first one."""

    def __init__(self) -> None:
        self.refuses: list[dict[str, Any]] = []
        self.hangs = False
        self.says = b""
        self.tokens = self.watches = self.calls = 0
        app = web.Application()
        app.router.add_post("/v3/auth/authenticate", self._authenticate)
        app.router.add_post("/v3/kv/range", self._range)
        app.router.add_post("/v3/watch", self._watch)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def start(self) -> str:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0]
        return f"http://{host}:{port}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _authenticate(self, _: web.Request) -> web.Response:
        self.tokens += 1
        return web.json_response({"token": f"token-{self.tokens}"})

    async def _range(self, _: web.Request) -> web.Response:
        self.calls += 1
        if self.hangs:
            await asyncio.sleep(60)
        if self.refuses:
            return web.json_response(self.refuses.pop(0), status=400)
        return web.json_response(HEADER)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.watches += 1
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(json.dumps({"result": {"created": True, **HEADER}}).encode() + b"\n")
        await answer.write(self.says)
        await asyncio.sleep(60)  # it says nothing more: it hears nothing of the others
        return answer


@pytest.fixture
async def members() -> AsyncIterator[list[Member]]:
    made = [Member(), Member()]
    yield made
    for member in made:
        await member.stop()


async def test_a_token_from_before_a_change_of_roles_is_renewed(
    members: list[Member], tmp_path: Any
) -> None:
    """etcd calls it a bad request. A worker that starts would end as if its flags were wrong."""
    member = members[0]
    password = tmp_path / "password"
    password.write_text("secret")
    password.chmod(0o600)
    login = ServerSecurity(user="me", password_file=str(password))
    client = await EtcdClient.connect(await member.start(), security=login)
    before = member.tokens
    member.refuses = [{"code": 3, "message": OLD}]
    assert await client.get("key") is None
    assert member.tokens == before + 1
    member.refuses = 2 * [{"code": 3, "message": OLD}]
    with pytest.raises(RegistryUnavailable, match="auth store"):
        await client.get("key")
    member.refuses = [{"code": 3, "message": "etcdserver: user name is empty"}]
    with pytest.raises(ConfigError):
        await client.get("key")
    await client.close()


async def connect(members: list[Member]) -> tuple[EtcdClient, asyncio.Task[None]]:
    """Return a client of all members, and the task of its watch, which the first member serves."""
    urls = [await member.start() for member in members]
    client = await EtcdClient.connect(",".join(urls), timeout_s=1.0)

    async def watch() -> None:
        async for _ in client.stream("/watch", {"create_request": {}}, idle_s=60.0):
            watching.set()

    watching = asyncio.Event()
    task = asyncio.create_task(watch())
    await asyncio.wait_for(watching.wait(), 5)
    return client, task


async def test_a_full_etcd_ends_no_watch(members: list[Member]) -> None:
    """etcd then refuses writes, but its watches go on. Each worker repeats its writes every second.
    If a refused write ended the watches, the worker would read all keys again every second."""
    client, task = await connect(members)
    members[0].refuses = [{"code": 8, "message": "etcdserver: mvcc: database space exceeded"}]
    with pytest.raises(RegistryUnavailable, match="space exceeded"):
        await client.get("key")
    done, _ = await asyncio.wait([task], timeout=0.2)
    assert not done
    assert not members[1].calls
    task.cancel()
    await client.close()


async def test_calls_refused_at_once_leave_one_member_only(members: list[Member]) -> None:
    client, task = await connect(members)
    members[0].refuses = 2 * [{"code": 14, "message": "etcdserver: no leader"}]
    refused = await asyncio.gather(client.get("a"), client.get("b"), return_exceptions=True)
    assert [type(one) for one in refused] == 2 * [RegistryUnavailable]
    with pytest.raises(RegistryUnavailable):
        await asyncio.wait_for(task, 5)
    assert await client.get("key") is None
    assert members[1].calls == 1
    await client.close()


async def test_a_server_that_is_no_etcd_is_refused_at_once(members: list[Member]) -> None:
    url = (await members[0].start()).replace("//", "//me:secret@")
    members[0].refuses = [{"code": 5, "message": "Not Found"}]
    with pytest.raises(ConfigError, match="Not Found"):
        await EtcdClient.connect(url)


@given(st.text(min_size=1, max_size=6), st.text(max_size=6))
def test_a_range_bounds_exactly_the_prefixed_keys(prefix: str, rest: str) -> None:
    found = range_of(prefix)
    for key in (rest.encode(), (prefix + rest).encode()):
        assert (found["key"] <= key < found["range_end"]) == key.startswith(prefix.encode())


def test_urls() -> None:
    assert parse_url("127.0.0.1:99")[0] == [("http", "127.0.0.1", 99)]
    endpoints, credentials = parse_url("https://me:p%40ss@a:1,https://b")
    assert endpoints == [("https", "a", 1), ("https", "b", 2379)]
    assert credentials == ("me", "p@ss")
    for bad in ("", "ftp://x", "http://x/path", "http://:2379", "http://x:port"):
        with pytest.raises(ConfigError):
            parse_url(bad)
    with pytest.raises(ConfigError, match="cannot read etcd URL 'http://x/path'"):
        parse_url("http://me:secret@x/path")
