"""The frontend process leaves."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from pullfill.registry import keys
from pullfill.registry.client import EtcdClient
from tests.support import web
from tests.support.frontend_http import NAMESPACE, Served, expected, serve, workers
from tests.support.frontend_rig import FakeDecode
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
