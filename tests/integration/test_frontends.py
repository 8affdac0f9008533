"""Two frontend processes at one port, over fake decode workers and a real etcd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.etcd import EtcdServer, free_ports
from tests.support.frontend_http import (
    PATIENCE_S,
    Served,
    frontend,
    workers,
)
from tests.support.frontend_rig import FakeDecode
from tests.support.waiting import soon

Pair = tuple[str, Served, Served]
PROMPT = {"model": "m", "prompt": "hello", "max_tokens": 3}


@pytest.fixture(scope="module")
def pair(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The URL that both frontends share, and the frontends."""
    (port,) = free_ports(1)
    flags = ("--port", str(port), "--own-port", "0")
    where = tmp_path_factory.mktemp("pair")
    (where / "etcd").mkdir()
    with (
        EtcdServer(where / "etcd") as etcd,
        frontend(etcd, where / "one.log", model_path, *flags) as one,
        frontend(etcd, where / "two.log", model_path, *flags) as two,
    ):
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
