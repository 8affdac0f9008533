"""`pullfill upgrade`: each process gets a successor. They are `sh`, always ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pullfill.deploy import changes, devices, installed
from pullfill.deploy.children import StartFailed
from pullfill.deploy.defaults import Placement
from pullfill.deploy.installed import Release
from pullfill.deploy.orders import Upgrade
from pullfill.errors import ConfigError, IncompatibleError, RegistryUnavailable, UnavailableError
from tests.support.waiting import eventually
from tests.support.workers import record
from tests.unit.deploy.test_changes import Rig, rig

__all__ = ["rig"]
NEW = Release(pullfill="9.9.9", wire=installed.running().wire, vllm="")


@pytest.fixture(autouse=True)
def _cluster(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """etcd answers, and another release is installed."""

    @asynccontextmanager
    async def etcd_of(*_: object) -> AsyncIterator[None]:
        yield

    async def workers(*_: object) -> list[object]:
        return [record("decode-1")]

    monkeypatch.setattr(changes, "etcd_of", etcd_of)
    monkeypatch.setattr(changes, "workers", workers)
    monkeypatch.setattr(installed, "installed", lambda: NEW)


def said(rig: Rig) -> list[str]:
    return [line.split(" after")[0] for line in rig.said]


async def test_all_one_by_one_with_the_successor_first(rig: Rig) -> None:
    async with rig.up("nats", "decode-0", "prefill-0", "frontend-0"):
        old = {name: rig.pid(name) for name in rig.alive}
        logs = {name: Path(rig.children.entry(name).log) for name in old}
        await rig.order(Upgrade())
        first, *steps, last = said(rig)
        assert first.startswith(f"pullfill {installed.running().pullfill} -> 9.9.9, wire version")
        for name in ("prefill-0", "decode-0", "frontend-0"):
            next_four, steps = steps[:4], steps[4:]
            assert next_four == [
                f"{name}-next starts", f"{name}-next ready", f"{name} drains", f"{name} has ended",
            ]  # fmt: skip
        assert "the supervisor" in last
        new = {name: rig.pid(name) for name in rig.alive}
        assert set(new) == set(old)
        assert {name for name in new if new[name] == old[name]} == {"nats"}
        assert {name: Path(rig.children.entry(name).log) for name in new} == logs
        assert all(log.exists() for log in logs.values())
        assert set(rig.keeper.watched) == set(old)
        rig.children["decode-0"].kill()
        await asyncio.to_thread(
            eventually, lambda: rig.children.entry("decode-0").restarts == 1, "it is kept"
        )


async def test_frontends_with_ports_of_their_own_take_turns(rig: Rig) -> None:
    async with rig.up("decode-0", "frontend-0", "frontend-1"):
        await rig.order(Upgrade(names=["frontend-1"]))
        assert said(rig)[1:5] == [
            "frontend-1 drains", "frontend-1 has ended", "frontend-1 starts", "frontend-1 ready",
        ]  # fmt: skip
        assert not any("decode" in line for line in rig.said)


@pytest.mark.parametrize("error", [StartFailed, RegistryUnavailable])
async def test_a_successor_that_does_not_start_changes_nothing(
    rig: Rig, error: type[UnavailableError]
) -> None:
    rig.fails.add("decode-0-next")
    rig.error = error
    async with rig.up():
        old = {name: rig.pid(name) for name in rig.alive if name.startswith("decode")}
        with pytest.raises(error, match="decode-0-next died"):
            await rig.order(Upgrade())
        assert {name: rig.pid(name) for name in rig.alive if name.startswith("decode")} == old
        assert "decode-0-next" not in rig.keeper.watched


@pytest.mark.parametrize("room", [True, False])
async def test_on_a_gpu_it_needs_room(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    taken: list[object] = []

    def another(*given: object) -> Placement:
        taken.append(given[3])
        if not room:
            raise ConfigError("full")
        return Placement(gpus=(1,))

    monkeypatch.setattr(devices, "place_another", another)
    async with rig.up("decode-0", "decode-1"):
        for name in ("decode-0", "decode-1"):
            rig.children.spec(name).place = Placement(gpus=(0,))
        await rig.order(Upgrade(names=["decode-0"]))
        assert taken == [[Placement(gpus=(0,))] * 2]
        assert ("decode-0-next starts" in said(rig)) == room
        assert rig.alive == {"decode-0", "decode-1"}


@pytest.mark.parametrize(
    "other", [Release(pullfill="9", wire=0), Release(pullfill="9", wire=NEW.wire, vllm="0.1.0")]
)
async def test_what_cannot_join_is_not_started(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, other: Release
) -> None:
    monkeypatch.setattr(installed, "installed", lambda: other)
    async with rig.up():
        old = {name: rig.pid(name) for name in rig.alive}
        with pytest.raises(IncompatibleError, match="cannot serve side by side"):
            await rig.order(Upgrade())
        assert {name: rig.pid(name) for name in rig.alive} == old
