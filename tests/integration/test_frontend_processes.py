"""Frontend processes over fake decode workers: one that stops, two at one port, a new certificate,
and stock servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pullfill.registry import keys
from pullfill.registry.client import EtcdClient
from tests.support import web
from tests.support.certificates import Certificates, make_certificates
from tests.support.cluster import Cluster
from tests.support.etcd import free_ports
from tests.support.frontend_http import (
    NAMESPACE,
    PATIENCE_S,
    Served,
    expected,
    frontend,
    serve,
    workers,
)
from tests.support.frontend_rig import FakeDecode, FakeStock, World, events
from tests.support.waiting import soon


@pytest.fixture
def served(model_path: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """A frontend of this test's own. Its parameter: --ready-grace."""
    with serve(tmp_path, model_path, "--ready-grace", request.param) as frontend:
        yield frontend


@pytest.mark.parametrize("served", ["60"], indirect=True)
async def test_it_says_that_it_leaves_serves_on_and_ends_what_is_left_with_an_error(
    served: Served,
) -> None:
    asked = {"model": "m", "max_tokens": 400, "stream": True}
    fake = FakeDecode("decode-1", model="m", max_model_len=512, step_s=0.02)
    async with workers(served, fake) as http, served.client() as client:
        streams = [
            await client.completions.create(prompt="abc", **asked),
            await client.chat.completions.create(
                messages=[{"role": "user", "content": "abc"}], **asked
            ),
        ]
        for stream in streams:
            await anext(stream)
        served.process.send_signal(signal.SIGTERM)
        await soon(lambda: web.get(f"{served.url}/ready").status_code == 503)
        assert "this frontend drains" in (await http.get("/ready")).json()["reasons"]
        body = {"model": "m", "prompt": "abc", "max_tokens": 2}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        served.process.send_signal(signal.SIGTERM)
        for stream in streams:
            with pytest.raises(openai.APIError, match="this frontend stops"):
                async for _ in stream:
                    pass
        await soon(lambda: served.process.poll() is not None)
        assert served.process.poll() == 0


@pytest.mark.parametrize("served", ["0"], indirect=True)
@pytest.mark.essential
async def test_drain_finishes_open_streams_and_exits_0(served: Served) -> None:
    fake = FakeDecode("decode-1", model="m", max_model_len=512, step_s=0.01)
    etcd = await EtcdClient.connect(served.etcd.url)
    async with workers(served, fake), served.client() as client:
        stream = await client.completions.create(
            model="m", prompt="abc", max_tokens=100, stream=True
        )
        text = ""
        async for chunk in stream:
            if not text:
                served.process.send_signal(signal.SIGTERM)
            text += chunk.choices[0].text
        assert text == expected(fake.added[0].prompt_token_ids or [], 100)
        await soon(lambda: served.process.poll() is not None)
        assert served.process.poll() == 0
    assert await etcd.get(keys.worker(NAMESPACE, "frontend", served.instance_id)) is None
    await etcd.close()


# --------------------------------------------------------------------------
# Two frontend processes at one port, over fake decode workers and a real etcd.


Pair = tuple[str, Served, Served]
PROMPT = {"model": "m", "prompt": "hello", "max_tokens": 3}


@pytest.fixture(scope="module")
def pair(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The URL that both frontends share, and the frontends."""
    (port,) = free_ports(1)
    flags = ("--port", str(port), "--own-port", "0")
    with Cluster(tmp_path_factory.mktemp("pair"), model_path) as cluster:
        cluster.start_servers()
        with frontend(cluster, *flags) as one, frontend(cluster, *flags) as two:
            yield f"http://127.0.0.1:{port}", one, two


async def ask(url: str) -> str:
    """Send a prompt over a new connection. Return the id of the answer."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, verify=False) as http:
        answer = await http.post("/v1/completions", json=PROMPT)
        answer.raise_for_status()
        return str(answer.json()["id"])


async def found(url: str, request_id: str, header: dict[str, str] | None = None) -> int:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, verify=False) as http:
        return (await http.get(f"/pullfill/requests/{request_id}", headers=header)).status_code


async def soon_found(url: str, request_id: str) -> None:
    """The other frontend has one second to tell of its request. A busy machine may need more."""
    assert await soon(lambda: found(url, request_id), good=lambda code: code != 404) == 200


@pytest.mark.essential
async def test_both_serve_one_port_and_explain_the_requests_of_both(pair: Pair) -> None:
    shared, one, two = pair
    fake = FakeDecode("decode-1", model="m", max_model_len=512)
    async with workers(one, fake, seen_by=[two]):
        ids = [await ask(shared) for _ in range(20)]
        own = {"x-pullfill-asked-by": "a test"}  # so a frontend answers from its own records
        mine = [[await found(f.url, i, own) for i in ids] for f in (one, two)]
        assert all(sorted(codes) == [200, 404] for codes in zip(*mine, strict=True))
        assert all(200 in codes for codes in mine), "each frontend has served some of them"
        for url in (shared, one.url, two.url):
            for request_id in ids:
                await soon_found(url, request_id)
        assert await found(shared, "cmpl-unknown") == 404


# --------------------------------------------------------------------------
# The frontend speaks HTTPS, and shows the certificate that its files hold now.


def put(new: Certificates, into: Path) -> None:
    """Replace both files, each at once."""
    into.mkdir(exist_ok=True)
    for source, name in ((new.cert, "cert.pem"), (new.key, "key.pem")):
        (into / "next").write_bytes(source.read_bytes())
        os.replace(into / "next", into / name)


async def shown(served: Served) -> bytes:
    """The certificate that a new connection gets, in DER."""
    context = ssl._create_unverified_context()
    port = httpx.URL(served.url).port
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return found


Secure = tuple[Served, Path, Certificates, Certificates]


@pytest.fixture
def secure(model_path: Path, tmp_path: Path) -> Iterator[Secure]:
    """A frontend that speaks HTTPS, the directory of its certificate, that certificate, and a new
    one."""
    old, new = (make_certificates(tmp_path / name) for name in ("old", "new"))
    put(old, live := tmp_path / "live")
    flags = (f"--ssl-certfile={live / 'cert.pem'}", f"--ssl-keyfile={live / 'key.pem'}")
    with serve(tmp_path / "cluster", model_path, *flags) as served:
        yield served, live, old, new


@pytest.mark.essential
async def test_a_new_certificate_is_shown_while_answers_stream(secure: Secure) -> None:
    served, live, old, new = secure
    trusts_old, trusts_new = (ssl.create_default_context(cafile=str(x.ca)) for x in (old, new))
    fake = FakeDecode("decode-1", model="m", max_model_len=512, step_s=0.01)
    body = {"model": "m", "prompt": "abc", "max_tokens": 400, "stream": True}
    async with (
        workers(served, fake, verify=trusts_old) as http,
        httpx.AsyncClient(base_url=served.url, verify=trusts_new, trust_env=False) as other,
    ):
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await other.get("/ready")
        first = await shown(served)
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data: {")
            # A certificate without its key changes nothing.
            (live / "cert.pem").write_bytes(new.cert.read_bytes())
            await soon(lambda: "the last certificate stays" in served.log.read_text())
            assert await shown(served) == first
            put(new, live)
            await soon(lambda: "holds another certificate" in served.log.read_text())
            assert await shown(served) != first
            assert (await other.get("/ready")).status_code == 200
            heard = [json.loads(line[6:]) async for line in lines if line.startswith("data: {")]
        text = "".join(part["choices"][0]["text"] for part in heard)
        assert text == expected(fake.added[0].prompt_token_ids or [], 400)[1:]


# --------------------------------------------------------------------------
# A real frontend process in front of scripted stock servers.


async def test_stock_servers_behind_a_frontend(model_path: Path, tmp_path: Path) -> None:
    world = World()
    prefill, decode = (FakeStock(world, root=str(model_path)) for _ in range(2))
    async with prefill.running(), decode.running(), contextlib.AsyncExitStack() as ends:
        servers = f"prefill={prefill.url},decode={decode.url}"
        process = serve(tmp_path, model_path, "--servers", servers)  # asks them as it starts
        served = await asyncio.to_thread(process.__enter__)
        ends.push_async_callback(asyncio.to_thread, process.__exit__, None, None, None)
        http = await ends.enter_async_context(workers(served))

        async def told(path: str) -> Any:
            return (await http.get(path)).json()

        both = {"prefill": 1, "decode": 1}
        found = await soon(lambda: told("/ready"), good=lambda it: it["stock"] == both)
        assert (found["ready"], found["degraded"], found["reasons"]) == (True, False, [])
        body, headers = PROMPT | {"stream": True}, {"x-request-id": "r/1"}
        got = await http.post("/v1/completions", json=body, headers=headers)
        assert got.content == b"".join(events("r/1", PROMPT))
        # The record is written when the stream has ended, which its client sees first.
        path = "/pullfill/requests/cmpl-r%2F1"
        record = await soon(lambda: told(path), good=lambda it: "path" in it)
        assert (record["path"], record["decode_instance"]) == ("staged", decode.url)
        assert [s["stage"] for s in record["stages"]] == ["prefill", "decode"]
        assert [model["id"] for model in (await told("/v1/models"))["data"]] == ["m"]
        status = (await told("/pullfill/status"))["stock"]
        assert [row["state"] for row in status] == ["ready", "ready"]
