"""The registry while etcd is stopped, while this machine is, and when a leader is killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pullfill.errors import PullfillError
from pullfill.registry import membership
from pullfill.registry.client import EtcdClient
from pullfill.registry.directory import Directory, revoke_worker
from pullfill.registry.live_settings import Settings, store
from pullfill.wire import QueueSettings, WorkerState
from tests.support.etcd import EtcdCluster, EtcdServer
from tests.support.waiting import soon
from tests.support.workers import member

pytestmark = pytest.mark.slow
NS = "chaos"


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path / "etcd") as server:
        yield server


@pytest.fixture
async def client(etcd: EtcdServer) -> AsyncIterator[EtcdClient]:
    client = await EtcdClient.connect(etcd.url, wait_s=10)
    yield client
    await client.close()


@pytest.mark.essential
async def test_stopped_longer_than_the_ttl(etcd: EtcdServer, client: EtcdClient) -> None:
    """The worker comes back as another incarnation, and was a member all the time for a directory
    with a connection of its own."""
    made, changes = list[str](), list[tuple[bool, bool]]()
    worker = member(client, NS, "decode-1", ttl_s=2, made=made)
    watcher = await EtcdClient.connect(etcd.url, wait_s=10)
    directory = Directory(watcher, NS, ["decode"], ttl_s=2)
    await worker.join()
    await directory.start()
    directory.subscribe(lambda old, new: changes.append((bool(old), bool(new))))
    await soon(lambda: "decode-1" in directory.workers("decode"))
    etcd.pause()
    await soon(lambda: not worker.lease and not directory.reachable)
    assert list(directory.workers("decode")) == ["decode-1"]
    assert len(made) == 1  # no new incarnation before etcd is back
    worker.note_state(WorkerState.DRAINING)
    etcd.resume()
    await soon(lambda: len(made) > 1 and made[-1] == worker.incarnation, within_s=20)
    assert len(made) == len(set(made)) == 2
    found = directory.workers
    await soon(lambda: found("decode")["decode-1"].incarnation == worker.incarnation)
    assert not worker.revoked.is_set()
    assert (True, False) not in changes
    assert found("decode")["decode-1"].state is WorkerState.DRAINING
    await directory.close()
    await worker.leave()
    await watcher.close()


@pytest.mark.essential
async def test_a_paused_virtual_machine_is_not_revoked(
    client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No clock here tells that time passed, as all stand still: etcd's answers do."""
    missed_s, made = 0.0, list[str]()
    monkeypatch.setattr(membership, "boot_s", lambda: time.monotonic() - missed_s)
    worker = member(client, NS, "decode-1", ttl_s=2, made=made)
    await worker.join()
    await asyncio.sleep(0.3)
    time.sleep(3.0)  # noqa: ASYNC251 - nothing of this process runs
    missed_s = 3.0
    first = worker.incarnation
    await soon(lambda: worker.incarnation != first or worker.revoked.is_set(), within_s=20)
    assert not worker.revoked.is_set()
    assert made == [first, worker.incarnation]
    assert await revoke_worker(client, NS, "decode-1") is not None
    await asyncio.wait_for(worker.revoked.wait(), 15)
    await worker.leave()


@pytest.mark.essential
async def test_nobody_loses_its_lease_when_the_etcd_leader_is_killed(tmp_path: Path) -> None:
    made: list[str] = []
    with EtcdCluster(tmp_path) as cluster:
        client = await EtcdClient.connect(cluster.url, wait_s=30.0)
        follower = await Settings(client, "ns", QueueSettings).start()
        worker = member(client, "ns", "decode-1", ttl_s=5, made=made)
        await worker.join()
        leader = await asyncio.to_thread(cluster.leader)
        await asyncio.to_thread(leader.kill)
        began = time.monotonic()
        while True:
            try:
                await store(client, "ns", "queue.max_jobs", "7")
                break
            except PullfillError:
                assert time.monotonic() < began + 30.0
        await soon(lambda: follower.current.max_jobs == 7, 30.0)
        await asyncio.sleep(6.0)  # a TTL and more
        assert worker.lease
        assert len(made) == 1
        assert not worker.revoked.is_set()
        await worker.leave()
        await follower.close()
        await client.close()
