"""What the contract tests share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import count

import pytest

from pullfill.registry.client import EtcdClient
from tests.support.etcd import EtcdServer
from tests.support.nats import NatsServer

_serial = count()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One etcd for all tests of this process. Each keeps to its own namespace (`ns`), and one that
    stops, pauses or sets up a server has a server of its own."""
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(scope="session")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One NATS for all tests of this process, as `etcd`. Each has a stream of its own."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    try:
        asyncio.run(server.start())
        yield server
    finally:
        server.stop()


@pytest.fixture
async def client(etcd: EtcdServer) -> AsyncIterator[EtcdClient]:
    client = await EtcdClient.connect(etcd.url, wait_s=10)
    yield client
    await client.close()


@pytest.fixture
def ns() -> str:
    """A namespace of this test's own."""
    return f"ns{next(_serial)}"
