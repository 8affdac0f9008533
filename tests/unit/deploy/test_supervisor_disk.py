"""A cluster whose state directory is on a full disk: a real one of 40 MiB, processes of `sh`."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rich.console import Console

from pullfill.config import RESTARTS_ENV, ClusterFile
from pullfill.deploy import plan
from pullfill.deploy.state import Launch, StateDir
from pullfill.deploy.supervisor import MAX_DEATHS, Children, DiskWatch, Keeper
from pullfill.deploy.view import ProcessView
from tests.support.small_disk import full, small_disk
from tests.support.waiting import eventually


class Rig:
    def __init__(self, directory: Path) -> None:
        self.state = StateDir(directory)
        self.state.logs.mkdir(parents=True)
        self.state.write_launch(Launch(cluster_id="id", model="m"))
        cluster = ClusterFile(namespace="n", nats_url="q", etcd_url="e", frontend_url="")
        self.output = io.StringIO()
        self.children = Children(cluster, self.state, ProcessView(Console(file=self.output), ""))
        self.stop = asyncio.Event()
        self.keeper = Keeper(plan.UpOptions(), self.children, self.stop, "id", first_pause_s=0.001)
        self.watch = DiskWatch(self.children, restart=True)

    def launch(self, name: str, script: str) -> None:
        argv, env = ["sh", "-c", script], {"PATH": "/usr/bin:/bin"}
        self.children.launch(plan.ProcessSpec(name=name, role=name, argv=argv, env=env))

    def said(self) -> str:
        return " ".join(self.output.getvalue().split())

    def recorded(self) -> list[int]:
        """Restarts of each process, as other processes read it."""
        cluster = self.state.cluster()
        assert cluster is not None
        return [entry.restarts for entry in cluster.processes]

    @asynccontextmanager
    async def keeping(self, name: str) -> AsyncIterator[None]:
        self.keeper.watch(name)
        try:
            yield
        finally:
            self.stop.set()
            await self.keeper.forget(name)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with small_disk(tmp_path / "disk", 40) as directory:
        rig = Rig(directory)
        yield rig
        for name in rig.children.names:
            rig.children[name].kill()
        rig.children.reap()


async def until(check: Callable[[], bool]) -> None:
    await asyncio.to_thread(eventually, check, "what the keeper does")


def test_it_is_told_once_and_what_it_broke_is_mended(rig: Rig) -> None:
    rig.launch("nats", "echo no space left on device; exec sleep 60")
    with full(rig.state.path):
        for name in ("etcd", "decode"):
            rig.launch(name, "sleep 60")
        for _ in range(2):
            rig.watch.look()
        assert rig.recorded() == [0], "the old record is whole"
        assert not list(rig.state.path.glob(".*")), "no half of a file is left"
        assert rig.said().count("is full (0 MiB free): serving goes on") == 1
        assert rig.said().count("(No space left on device): other commands see an old list") == 1
        assert all(rig.children[name].poll() is None for name in rig.children.names)
    rig.watch.look()
    assert rig.recorded() == [0, 0, 0]
    assert "has room again" in rig.said()
    assert rig.said().count("nats starts again: it met a full disk") == 1
    assert rig.children["nats"].wait(10) == -15, "it would go on storing nothing"
    assert rig.children["etcd"].poll() is None
    rig.watch.look()
    assert rig.said().count("nats starts again") == 1


def test_a_disk_that_was_full_for_a_moment(rig: Rig) -> None:
    """Between two looks. The log of NATS tells it."""
    rig.launch("nats", "echo '[ERR] write 1.blk: no space left on device'; exec sleep 60")
    eventually(lambda: rig.state.log_of("nats").stat().st_size > 0, "it tells")
    rig.watch.look()
    assert rig.children["nats"].wait(10) == -15
    rig.launch("nats", "sleep 60")
    rig.watch.look()
    assert rig.children["nats"].poll() is None, "that line is about the process before"


async def test_a_server_that_a_full_disk_ends_comes_back_when_there_is_room(rig: Rig) -> None:
    """However often it dies meanwhile."""
    rig.launch("etcd", "sleep 60")
    async with rig.keeping("etcd"):
        with full(rig.state.path):
            rig.children["etcd"].kill()
            await until(lambda: "etcd died" in rig.said())
            await asyncio.sleep(0.1)
            assert rig.children.entry("etcd").restarts == 0, "it would die again"
        await until(lambda: rig.recorded() == [1])


async def test_no_death_counts_while_the_disk_is_full(rig: Rig) -> None:
    """A worker is started again at once: it needs no disk."""
    rig.launch("decode", f"test ${RESTARTS_ENV} -gt {MAX_DEATHS + 1} && sleep 60; exit 1")
    with full(rig.state.path):
        async with rig.keeping("decode"):
            await until(lambda: rig.children.entry("decode").restarts == MAX_DEATHS + 2)
    assert "gave up" not in rig.said()
