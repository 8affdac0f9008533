"""What the contract tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import count

import pytest

from pullfill.registry.client import EtcdClient
from tests.support.etcd import EtcdServer
from tests.support.frontend_http import Served, serve

_serial = count()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One etcd for all tests of a file."""
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
async def client(etcd: EtcdServer) -> AsyncIterator[EtcdClient]:
    client = await EtcdClient.connect(etcd.url, wait_s=10)
    yield client
    await client.close()


@pytest.fixture
def ns() -> str:
    """A namespace of this test's own."""
    return f"ns{next(_serial)}"


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One frontend process for all tests; each brings its own workers and takes them away again."""
    with serve(tmp_path_factory.mktemp("frontend")) as frontend:
        yield frontend
