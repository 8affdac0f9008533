"""The real frontend process (vLLM's app) over a real etcd and whatever fake decode workers a test
brings. One process serves many tests (`tests/integration/conftest.py`)."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from pullfill import wire
from pullfill.registry import keys
from pullfill.registry.client import EtcdClient
from pullfill.wire import WorkerRecord
from tests.support.checkpoint import tiny_checkpoint
from tests.support.cluster import Cluster
from tests.support.etcd import EtcdServer
from tests.support.fake_vllm import answer
from tests.support.frontend_rig import FakeDecode
from tests.support.waiting import soon, until

if TYPE_CHECKING:
    import openai

PATIENCE_S = 40.0
START_S = 120.0
"""Importing vLLM takes ten seconds of a core that may be wanted by many."""
NAMESPACE = "test"
PAGE = "http://page.example"
"""Pages of this site may read answers of the frontend."""


@dataclass
class Served:
    etcd: EtcdServer
    process: Any
    url: str
    instance_id: str
    log: Path

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        import openai  # two thirds of a second, in every test process

        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options
        )


@contextmanager
def serve(directory: Path, model: Path, *flags: str) -> Iterator[Served]:
    """A frontend over servers of its own."""
    pages = ("--allowed-origins", f'["{PAGE}"]')
    with Cluster(directory, model) as cluster:
        cluster.start_servers()
        with frontend(cluster, *pages, *flags) as served:
            yield served


@contextmanager
def frontend(cluster: Cluster, *flags: str) -> Iterator[Served]:
    """A frontend process without NATS; ends with SIGTERM and must exit 0, unless the test has
    killed it."""
    names = ("--served-model-name=m", "--max-model-len=1024", "--drain-timeout=20")
    stores = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}  # responses in the background
    worker = cluster.launch("frontend", *names, *flags, nats="nats://127.0.0.1:1", env=stores)

    def registered() -> list[WorkerRecord]:
        """What it says of itself in the registry, once it is about to serve."""
        assert worker.alive, worker.tail()
        return [r for r in cluster.records("frontend").values() if r.pid == worker.pid]

    (record,) = until(registered, START_S, f"it registers, see {worker.log}")
    yield Served(cluster.etcd, worker.process, record.http, record.instance_id, worker.log)
    if worker.alive:
        assert worker.stop(PATIENCE_S) == 0, worker.tail()


@asynccontextmanager
async def workers(
    served: Served,
    *fakes: FakeDecode,
    seen_by: Sequence[Served] = (),
    verify: ssl.SSLContext | bool = False,
) -> AsyncIterator[httpx.AsyncClient]:
    """The frontend with exactly these workers ready; afterwards with none.

    seen_by: other frontends that must see the workers too, until they are killed.
    verify: what the client trusts, if the frontend speaks HTTPS. It then keeps its connection."""
    etcd = await EtcdClient.connect(served.etcd.url)
    async with httpx.AsyncClient(
        base_url=served.url, timeout=PATIENCE_S, verify=verify, trust_env=False
    ) as http:

        async def decode_count(count: int) -> None:
            async with asyncio.timeout(PATIENCE_S):
                for url in [one.url for one in (served, *seen_by) if one.process.poll() is None]:
                    while (await http.get(f"{url}/ready")).json()["decode"] != count:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)

        def key(fake: FakeDecode) -> str:
            return keys.worker(NAMESPACE, "decode", fake.instance_id)

        try:
            for fake in fakes:
                await etcd.put(key(fake.start()), wire.encode(fake.record))
            await decode_count(len(fakes))
            yield http
        finally:
            for fake in fakes:
                await etcd.delete(key(fake))
                await asyncio.to_thread(fake.die)
            await decode_count(0)
            await etcd.close()


async def generated(http: httpx.AsyncClient, served: Served) -> float:
    """How many tokens of answers the frontend has got from workers."""
    text = (await http.get(f"{served.url}/metrics")).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "vllm:generation_tokens_total"
    )


async def taken(http: httpx.AsyncClient, served: Served, tokens: float) -> None:
    """Returns once the frontend has got so many. What a worker has sent may still be on its way."""
    await soon(lambda: generated(http, served), good=lambda found: found >= tokens)


def expected(prompt: list[int], count: int) -> str:
    text: str = tokenizer().decode(answer(prompt, count))
    assert len(text) == count
    return text


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(tiny_checkpoint() / "tokenizer.json"))
