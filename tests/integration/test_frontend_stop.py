"""The frontend process leaves."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pullfill.registry import keys
from pullfill.registry.client import EtcdClient
from tests.support.fake_decode import FakeDecode
from tests.support.frontend_http import NAMESPACE, Served, expected, serve, until, workers


@pytest.fixture
def served(model_path: Path, tmp_path: Path) -> Iterator[Served]:
    """A frontend of this test's own."""
    with serve(tmp_path, model_path) as frontend:
        yield frontend


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
        await until(lambda: served.process.poll() is not None)
        assert served.process.poll() == 0
    assert await etcd.get(keys.worker(NAMESPACE, "frontend", served.instance_id)) is None
    await etcd.close()
