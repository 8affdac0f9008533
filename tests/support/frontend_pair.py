"""Frontends that share their suspects through real etcd, over fake decode workers that can die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from pullfill.registry.client import EtcdClient
from pullfill.registry.suspect_records import SuspectBoard
from tests.support.etcd import EtcdServer
from tests.support.fake_decode import FakeDecode
from tests.support.frontend_rig import Rig, rig

FATAL = 666
"""A token that ends every worker it reaches."""


@asynccontextmanager
async def frontend(
    etcd: EtcdServer,
    ns: str,
    name: str,
    *fakes: FakeDecode,
    restart_wait_s: float = 0.0,
    frontends: int = 1,
) -> AsyncIterator[tuple[Rig, SuspectBoard]]:
    """A frontend that shares its suspects through etcd. Its registry drops workers that died."""
    client = await EtcdClient.connect(etcd.url, wait_s=10, timeout_s=0.5)
    board = SuspectBoard(client, ns, name, lambda: frontends)
    async with rig(*fakes, restart_wait_s=restart_wait_s, board=board) as r:
        board.start(r.dispatcher.suspects)
        await r.ready(len(fakes))

        async def drop() -> None:
            while True:
                await asyncio.sleep(0.01)
                for fake in fakes:
                    if fake.killed_by and fake.instance_id in r.directory.records:
                        r.directory.remove(fake.instance_id)

        task = asyncio.create_task(drop())
        try:
            yield r, board
        finally:
            task.cancel()
            await board.close()
            await client.close()


class SharedFleet:
    """Decode workers that several frontends use. One that died leaves the registry of all after
    20 ms; another one comes in its place. slots: of each worker, see `FakeDecode`."""

    def __init__(self, count: int, rigs: list[Rig], slots: int = 0) -> None:
        self.rigs = rigs
        self._slots = slots
        self.all: list[FakeDecode] = []
        self._living = [self._another() for _ in range(count)]
        self._task = asyncio.create_task(self._keep())

    def _another(self) -> FakeDecode:
        name = f"decode-{len(self.all)}"
        fake = FakeDecode(name, step_s=0.004, fatal_token=FATAL, slots=self._slots).start()
        self.all.append(fake)
        for r in self.rigs:
            r.add(fake)
        return fake

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            for fake in [f for f in self._living if f.killed_by]:
                self._living.remove(fake)
                await asyncio.sleep(0.02)
                for r in self.rigs:
                    r.directory.remove(fake.instance_id)
                self._living.append(self._another())

    @property
    def deaths(self) -> list[tuple[int, ...]]:
        """Of each worker that died, the prompt that killed it."""
        return [tuple(fake.killed_by) for fake in self.all if fake.killed_by]

    @property
    def in_flight(self) -> int:
        return sum(r.dispatcher.in_flight for r in self.rigs)

    async def end(self) -> None:
        self._task.cancel()
        for fake in self.all:
            await asyncio.to_thread(fake.die)


@asynccontextmanager
async def frontends_of(
    etcd: EtcdServer, ns: str, *, frontends: int = 2, workers: int = 3, slots: int = 0
) -> AsyncIterator[tuple[list[Rig], SharedFleet]]:
    """Several frontends over the same workers, which are started again when they die."""
    async with AsyncExitStack() as stack:
        rigs = []
        for number in range(1, frontends + 1):
            made = frontend(
                etcd, ns, f"frontend-{number}", restart_wait_s=20.0, frontends=frontends
            )
            r, _ = await stack.enter_async_context(made)
            rigs.append(r)
        fleet = SharedFleet(workers, rigs, slots)
        stack.push_async_callback(fleet.end)
        for r in rigs:
            await r.ready(workers)
        yield rigs, fleet
