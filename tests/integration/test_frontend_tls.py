"""The frontend speaks HTTPS, and shows the certificate that its files hold now."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.support.certificates import Certificates, make_certificates
from tests.support.etcd import EtcdServer
from tests.support.frontend_http import Served, expected, frontend, workers
from tests.support.frontend_rig import FakeDecode
from tests.support.waiting import soon


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


@dataclass
class Secure:
    """A frontend that speaks HTTPS, with the files of its certificate in `live`."""

    served: Served
    log: Path
    live: Path
    old: Certificates
    new: Certificates


@pytest.fixture
def secure(model_path: Path, tmp_path: Path) -> Iterator[Secure]:
    old, new = (make_certificates(tmp_path / name) for name in ("old", "new"))
    put(old, live := tmp_path / "live")
    (tmp_path / "etcd").mkdir()
    flags = (f"--ssl-certfile={live / 'cert.pem'}", f"--ssl-keyfile={live / 'key.pem'}")
    log = tmp_path / "frontend.log"
    with (
        EtcdServer(tmp_path / "etcd") as etcd,
        frontend(etcd, log, model_path, "--port", "0", *flags) as served,
    ):
        yield Secure(served, log, live, old, new)


@pytest.mark.essential
async def test_a_new_certificate_is_shown_while_answers_stream(secure: Secure) -> None:
    served = secure.served
    trusts_old, trusts_new = (
        ssl.create_default_context(cafile=str(each.ca)) for each in (secure.old, secure.new)
    )
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
            (secure.live / "cert.pem").write_bytes(secure.new.cert.read_bytes())
            await soon(lambda: "the last certificate stays" in secure.log.read_text())
            assert await shown(served) == first
            put(secure.new, secure.live)
            await soon(lambda: "holds another certificate" in secure.log.read_text())
            assert await shown(served) != first
            assert (await other.get("/ready")).status_code == 200
            heard = [json.loads(line[6:]) async for line in lines if line.startswith("data: {")]
        text = "".join(part["choices"][0]["text"] for part in heard)
        assert text == expected(fake.added[0].prompt_token_ids or [], 400)[1:]
