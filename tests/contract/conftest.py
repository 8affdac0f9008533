"""What the contract tests share."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from pullfill.registry.client import EtcdClient
from pullfill.runtime import tracing
from tests.support.control_rig import Decode, Prefill, Raw
from tests.support.etcd import EtcdServer
from tests.support.handoff_rig import Cluster, Make
from tests.support.nats import NatsServer
from tests.support.otlp import Receiver
from tests.support.transfer_rigs import DENSE, Region, Rig, ipc_rig

_serial = count()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One etcd for all tests of this process. Each test uses a namespace of its own (`ns`).

    A test that stops, pauses or configures a server must start its own."""
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(scope="session")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One NATS for all tests of this process, as `etcd`. Each test uses a stream of its own."""
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
def make(tmp_path: Path, nats: NatsServer) -> Make:
    return partial(Cluster, tmp_path, nats)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    """A NATS of this test's own."""
    with NatsServer(tmp_path / "nats") as server:
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


@pytest.fixture
async def decode(request: pytest.FixtureRequest) -> AsyncIterator[Decode]:
    """A decode worker's control server, on loopback TCP.

    Its parameter, or DECODE of the module: arguments of `Decode`."""
    decode = Decode(**getattr(request, "param", getattr(request.module, "DECODE", {})))
    await decode.server.start("127.0.0.1")
    yield decode
    await decode.stop()


@pytest.fixture
async def connect(decode: Decode) -> AsyncIterator[Callable[..., Any]]:
    """Connects a prefill worker to `decode`. Unless `up` is False, waits until it is connected."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(name: str = "prefill-1", *, up: bool = True, **more: Any) -> Prefill:
            prefill = Prefill(decode, name, **more)
            stack.push_async_callback(prefill.link.close)
            if up:
                await prefill.link.wait_up(10)
            return prefill

        yield make


@pytest.fixture
async def raw(decode: Decode) -> Raw:
    """A bare connection to `decode`, over which the test says what it wants."""
    return await decode.raw()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Gets the spans of this process."""
    with Receiver() as receiver:
        tracing.begin(receiver.url, "both", "here")
        yield receiver
        tracing.close()


@pytest.fixture
def gpu_rig(tmp_path: Path) -> Iterator[Rig]:
    """cuda_ipc over GPUs of plain memory."""
    made = ipc_rig(tmp_path)
    yield made
    made.close()


@pytest.fixture
def gpu_region(gpu_rig: Rig) -> Region:
    return gpu_rig.region(DENSE)
