"""Which sides of a worker serve, whatever comes in the middle of a change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from pullfill.errors import RegistryUnavailable
from pullfill.registry.membership import Membership
from pullfill.runtime.lifecycle import end
from pullfill.wire import WorkerState
from pullfill.worker.switch import Side, Switch
from tests.support.waiting import soon

BOTH = frozenset({"decode", "prefill"})


class FakeMembership:
    def __init__(self, name: str, told: list[str]) -> None:
        self.revoked = asyncio.Event()
        self._name, self._told = name, told

    async def join(self, wait_s: float = 0.0) -> None:
        self._told.append(f"{self._name} joins")

    async def set_state(self, state: WorkerState) -> bool:
        self._told.append(f"{self._name} {state}")
        return True

    def note_state(self, state: WorkerState) -> None:
        self._told.append(f"{self._name} notes {state}")

    def refresh(self) -> None:
        pass

    async def leave(self) -> None:
        self.revoked.set()  # as etcd would tell it
        await asyncio.sleep(0)
        self._told.append(f"{self._name} leaves")


class FakeService:
    """idle: set when its work is done."""

    def __init__(self, name: str, told: list[str], idle: asyncio.Event, down: set[str]) -> None:
        self._name, self._told, self._idle, self.down = name, told, idle, down

    async def start(self, note: Any) -> None:
        self._told.append(f"{self._name} starts")

    async def stop_taking(self) -> None:
        self._told.append(f"{self._name} stops taking")

    async def finished(self) -> None:
        await self._idle.wait()

    async def give_up(self) -> None:
        self._told.append(f"{self._name} gives up")

    def status(self) -> dict[str, Any]:
        return {"servers": {"etcd": {"up": True}, "nats": {"up": "nats" not in self.down}}}


class FakeRole:
    """errors: what the next attempts to open raise. down: servers that do not answer."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.made: list[FakeMembership] = []
        self.idle = asyncio.Event()
        self.idle.set()
        self.errors: list[Exception] = []
        self.down: set[str] = set()
        self.name, self._told = name, told

    def as_role(self, role: str, service: Any) -> Any:
        self.made.append(FakeMembership(role, self._told))
        return self.made[-1]

    async def open(self, parts: AsyncExitStack) -> Any:
        if self.errors:
            raise self.errors.pop()
        return FakeService(self.name, self._told, self.idle, self.down)

    async def close(self) -> None:
        self._told.append(f"{self.name} rests")


class Rig:
    """A worker that begins as decode worker. told: what has happened since `forget`."""

    def __init__(self, drain_timeout_s: float = 60.0) -> None:
        self.told: list[str] = []
        self.decode, self.prefill = (FakeRole(name, self.told) for name in ("decode", "prefill"))
        roles: Any = self.decode, self.prefill
        self.sides = [Side(role, role.as_role) for role in roles]
        self.switch = Switch(self.sides, "decode", drain_timeout_s, again_s=0.01)
        self.task: asyncio.Task[None] | None = None

    async def becomes(self, roles: str) -> None:
        await soon(lambda: self.switch.roles == roles and not self.switch.told)


@asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[Rig]:
    await rig.switch.join()
    rig.task = asyncio.create_task(rig.switch.run())
    rig.told.clear()
    try:
        yield rig
    finally:
        await end(rig.task)
        await rig.switch.leave()


async def test_the_old_side_leaves_before_the_new_one_begins() -> None:
    async with running(Rig()) as rig:
        rig.switch.order(frozenset({"prefill"}))
        await rig.becomes("prefill")
        assert rig.told == [
            "decode stops taking", "decode draining", "decode leaves", "decode rests",
            "prefill joins", "prefill starts",
        ]  # fmt: skip
        rig.told.clear()
        rig.switch.order(frozenset({"prefill"}))  # once more
        await asyncio.sleep(0.05)
        assert rig.told == []
        rig.switch.order(frozenset({"decode"}))
        await rig.becomes("decode")
        assert (len(rig.decode.made), len(rig.prefill.made)) == (2, 1)
        assert not rig.switch.revoked.is_set(), "our own leaving is no order to drain"


async def test_work_that_does_not_end_is_given_up() -> None:
    async with running(Rig(drain_timeout_s=0.05)) as rig:
        rig.decode.idle.clear()
        rig.switch.order(frozenset({"prefill"}))
        await rig.becomes("prefill")
        assert rig.told.index("decode gives up") < rig.told.index("decode leaves")


async def test_the_last_order_counts() -> None:
    """The worker is ordered back while it drains: it ends where it began."""
    async with running(Rig()) as rig:
        rig.decode.idle.clear()
        rig.switch.order(frozenset({"prefill"}))
        await soon(lambda: "decode draining" in rig.told)
        rig.switch.order(frozenset({"decode"}))
        rig.decode.idle.set()
        await soon(lambda: "decode starts" in rig.told)
        assert "prefill joins" not in rig.told


async def test_a_side_that_cannot_begin_is_begun_again() -> None:
    async with running(Rig()) as rig:
        rig.prefill.errors = [RegistryUnavailable("etcd is away"), RuntimeError("bug")]
        rig.switch.order(frozenset({"prefill"}))
        await rig.becomes("prefill")
        assert rig.told.count("prefill rests") == 2, "what was opened is closed after each attempt"


async def test_a_revoked_lease_of_a_side_that_serves_is_told() -> None:
    async with running(Rig()) as rig:
        rig.switch.order(BOTH)
        await rig.becomes("both")
        rig.prefill.made[-1].revoked.set()
        await asyncio.wait_for(rig.switch.revoked.wait(), 5)


async def test_it_can_leave_in_the_middle_of_a_drain() -> None:
    rig = Rig()
    async with running(rig):
        rig.decode.idle.clear()
        rig.switch.order(frozenset({"prefill"}))
        await soon(lambda: "decode draining" in rig.told)
        assert rig.switch.roles == "decode", "it still serves its streams"
    assert "decode leaves" in rig.told
    assert "prefill joins" not in rig.told


async def test_a_stuck_engine_that_goes_on_leaves_a_side_that_drains_draining() -> None:
    async with running(Rig()) as rig:
        rig.switch.order(BOTH)
        await rig.becomes("both")
        rig.switch.note_state(WorkerState.DRAINING)
        assert rig.told[-2:] == ["decode notes draining", "prefill notes draining"]
        rig.decode.idle.clear()
        rig.switch.order(frozenset({"prefill"}))
        await soon(lambda: "decode draining" in rig.told)
        for state in (WorkerState.DRAINING, WorkerState.READY):
            rig.switch.note_state(state)
        notes = [said for said in rig.told if "notes" in said]
        assert notes[2:] == ["prefill notes draining", "prefill notes ready"]


async def test_a_switch_that_waits_for_a_task_to_end_can_be_cancelled() -> None:
    """SIGTERM cancels it. If that is lost, it goes on, and the worker never drains."""
    rig, left = Rig(), asyncio.Event()

    async def lingers() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
            await asyncio.sleep(0.1)

    membership: Any = Membership.__new__(Membership)
    membership._task, membership.lease = asyncio.create_task(lingers()), None
    async with running(rig):
        rig.sides[0].membership = membership
        rig.switch.order(frozenset({"prefill"}))
        await left.wait()
        await asyncio.wait_for(end(rig.task), 5)
        assert rig.switch.roles != "prefill"


async def test_no_role_is_given_up_while_the_next_could_not_begin(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig()
    rig.decode.down.add("nats")
    async with running(rig):
        rig.switch.order(frozenset({"prefill"}))
        await soon(lambda: "nats cannot be reached" in rig.switch.told)
        await asyncio.sleep(0.05)
        assert (rig.switch.roles, rig.told) == ("decode", [])
        assert caplog.text.count("nats cannot be reached") == 1, "once, not at each try"
        rig.decode.down.clear()
        await rig.becomes("prefill")
