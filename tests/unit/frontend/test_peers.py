"""How many frontends count when some have gone from the registry."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pullfill.frontend import peers
from pullfill.frontend.peers import Peers
from pullfill.registry.directory import OnChange
from pullfill.wire import WorkerRecord, WorkerState


class Listed:
    """The part of a `Directory` that `Peers` uses."""

    def __init__(self) -> None:
        self._records: dict[str, WorkerRecord] = {}
        self._tell: OnChange = lambda old, new: None

    def workers(self, role: str) -> dict[str, WorkerRecord]:
        return {name: r for name, r in self._records.items() if r.role == role}

    def subscribe(self, callback: OnChange) -> None:
        self._tell = callback

    def put(
        self, name: str, role: str = "frontend", state: WorkerState = WorkerState.READY
    ) -> None:
        old = self._records.get(name)
        self._records[name] = new = WorkerRecord(
            instance_id=name,
            incarnation="1",
            role=role,
            state=state,
            model="m",
            host="h",
            host_id="h",
            pid=1,
            started_at=0.0,
        )
        self._tell(old, new)

    def drop(self, name: str) -> None:
        self._tell(self._records.pop(name), None)


def three() -> tuple[Listed, Peers]:
    directory: Any = Listed()
    counted = Peers(directory, "own")
    for name in ("own", "other", "third"):
        directory.put(name)
    directory.put("decode-1", role="decode")
    return directory, counted


async def test_a_frontend_whose_key_went_counts_until_it_must_have_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "AWAY_S", 0.1)
    directory, counted = three()
    assert counted.count() == 3
    for name in ("own", "other", "decode-1"):
        directory.drop(name)
    assert counted.count() == 3
    await asyncio.sleep(0.15)
    assert counted.count() == 2, "itself, and the third"
    directory.put("other")
    assert counted.count() == 3


async def test_a_frontend_that_registers_again_counts_once() -> None:
    directory, counted = three()
    for name in ("own", "other"):
        directory.drop(name)
        directory.put(name)
    assert counted.count() == 3


async def test_a_frontend_that_has_drained_does_not_count() -> None:
    directory, counted = three()
    directory.put("other", state=WorkerState.DRAINING)
    assert counted.count() == 3, "its requests run on"
    directory.drop("other")
    assert counted.count() == 2
