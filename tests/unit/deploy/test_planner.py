"""What `pullfill plan` prints."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from pullfill.config import ClusterRef
from pullfill.deploy import planner
from pullfill.deploy.planner import (
    DECODE,
    PREFILL,
    Observation,
    PlanMember,
    PlanSettings,
    PlanState,
)
from pullfill.errors import UnavailableError
from pullfill.registry.client import KeyValue
from pullfill.wire import RoleMove, WorkerRole, decode

REF = ClusterRef("default", "http://h:1", "nats://h:1")


def cluster(**demand: float) -> dict[str, Any]:
    rows = [{"instance_id": f"decode-{n}", "role": "decode", "state": "ready"} for n in (1, 2)]
    elastic = {"elastic": "decode"}
    rows[0] |= {"load": {"requests": 4, "demand": demand, **elastic}}  # type: ignore[dict-item]
    rows[1] |= {"load": {"requests": 1, "demand": {}, **elastic}}  # type: ignore[dict-item]
    return {"workers": rows}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> planner.Plan:
    told = cluster(prefill_demand=0.5, backlog_s=4.0, pressure=0.6, kv=0.6, prompts=8, missed=8)
    monkeypatch.setattr(planner, "ask", lambda _: told)
    return planner.look(REF, PlanSettings(settle_s=0.0), PlanState())


def test_json(found: planner.Plan) -> None:
    told = planner.told(found)
    assert json.loads(json.dumps(told)) == told
    assert told["prefill"] == {
        "now": 0,
        "need": pytest.approx(0.714, abs=0.001),
        "right": 1,
        "why": "long prompts keep 0.5 workers busy; each should work 70% of the time; "
        "4.0 s of work wait; 8 of 8 long prompts were computed by decode workers",
    }
    assert told["decode"]["right"] == 1
    assert told["decode"]["why"] == (
        "the mean pressure is 0.3, 0.8 is right; the highest is 0.6, from the KV cache"
    )
    assert (told["backlog_s"], told["missed"]) == (4.0, 1.0)
    assert told["moves"] == [{"instance_id": "decode-2", "from": "decode", "to": "prefill"}]


def test_a_line_for_each_role_and_what_to_do(found: planner.Plan) -> None:
    stream = io.StringIO()
    Console(file=stream, width=200).print(planner.shown(found))
    head, prefill, decode, move = stream.getvalue().splitlines()
    assert head.split() == ["role", "now", "needed", "right", "why"]
    assert prefill.split()[:4] == ["prefill", "0", "0.71", "1"]
    assert decode.split()[:4] == ["decode", "2", "0.75", "1"]
    assert move.startswith("change of role: decode-2 to prefill: 0.71 prefill workers are needed")


def test_without_a_report_there_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "ask", lambda _: {"workers": []})
    with pytest.raises(UnavailableError, match="pullfill status"):
        planner.show(REF, PlanSettings())


def test_a_watch_settles_and_does_not_take_a_move_for_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter(range(0, 100, 5))
    monkeypatch.setattr(planner.time, "monotonic", lambda: float(next(now)))
    monkeypatch.setattr(planner, "ask", lambda _: cluster(prefill_demand=0.5))

    def sleep(seconds: float) -> None:
        assert seconds == 5.0
        if len(looks()) == 5:
            raise KeyboardInterrupt

    printed: list[str] = []

    def looks() -> list[dict[str, Any]]:
        printed.extend(capsys.readouterr().out.splitlines())
        return [json.loads(line) for line in printed]

    monkeypatch.setattr(planner.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        planner.show(REF, PlanSettings(settle_s=10.0), as_json=True, watch_s=5.0)
    assert [len(one["moves"]) for one in looks()] == [0, 0, 1, 1, 1]


# ------------------------------------------------------------------ --apply


class Etcd:
    """The planner's key. between: runs once between a planner's read and its write."""

    def __init__(self) -> None:
        self.value, self.revision = b"", 0
        self.between: Callable[[], None] | None = None

    async def get(self, key: str) -> KeyValue | None:
        assert key == "/pullfill/default/planner"
        return KeyValue(value=self.value, mod_revision=self.revision) if self.revision else None

    async def put_if(self, key: str, value: bytes, *, mod_revision: int) -> bool:
        between, self.between = self.between, None
        if between is not None:
            between()
        if mod_revision != self.revision:
            return False
        self.value, self.revision = value, self.revision + 1
        return True

    @property
    def move(self) -> RoleMove:
        return decode(self.value, RoleMove)


class Rig:
    """Planners of one cluster, which wants its first prefill worker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.etcd, self.orders = Etcd(), list[tuple[str, str]]()
        self.told = cluster(prefill_demand=0.5)
        monkeypatch.setattr(planner, "ask", lambda _: self.told)
        monkeypatch.setattr(planner, "ask_etcd", self._ask_etcd)
        monkeypatch.setattr(planner.operate, "order", self._order)

    def _ask_etcd(self, _: ClusterRef, question: Callable[[Any, str], Awaitable[Any]]) -> Any:
        async def ask() -> Any:
            return await question(self.etcd, "default")

        return asyncio.run(ask())

    async def _order(self, _: Etcd, namespace: str, instance_id: str, wanted: WorkerRole) -> None:
        assert self.etcd.move.instance_id == instance_id, "first noted, then ordered"
        self.orders.append((instance_id, wanted))

    def step(self, settings: PlanSettings = PlanSettings(settle_s=0.0)) -> planner.Plan:  # noqa: B008
        return planner.step(REF, settings, PlanState())


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_a_planner_that_starts_again_keeps_the_pause(rig: Rig) -> None:
    rig.step()
    rig.told["workers"][1]["role"] = "prefill"
    rig.told["workers"].append(cluster()["workers"][1] | {"instance_id": "decode-3"})
    rig.told["workers"][0]["load"]["demand"]["prefill_demand"] = 1.5
    again = rig.step()
    assert not again.moves
    assert "if that stays so, a worker changes in" in again.reasons[0]
    assert rig.step(PlanSettings(settle_s=0.0, cool_down_s=0.0)).moves


def test_nobody_is_ordered_while_the_last_one_is_on_its_way(rig: Rig) -> None:
    rig.step()
    rig.told["workers"][1]["instance_id"] = "decode-4"  # decode-2 is registered in no role
    found = rig.step(PlanSettings(settle_s=0.0, cool_down_s=0.0))
    assert not found.moves
    assert "decode-2" in found.reasons[0]


def test_without_a_decode_worker_a_prefill_worker_becomes_one(rig: Rig) -> None:
    """Two orders at the same time, or one and a death, may leave none."""
    row = {"instance_id": "p", "role": "prefill", "state": "ready", "load": {"elastic": "prefill"}}
    rig.told = {"workers": [row]}
    assert rig.step().moves
    assert rig.orders == [("p", WorkerRole.DECODE)]
    rig.told = {"workers": [row | {"load": {}}]}
    with pytest.raises(UnavailableError, match="pullfill status"):
        rig.step()


def test_a_worker_that_died_on_its_way_is_not_waited_for_for_ever() -> None:
    seen = Observation(500.0, (PlanMember("p", PREFILL), PlanMember("d", DECODE)), {})
    gone = RoleMove(instance_id="x", after=WorkerRole.PREFILL, at=1000.0)
    now, state = planner.remembered(gone, 7, 30.0 - 1, seen, PlanState())
    assert now.changing == ("x",)
    assert (state.moved_to, state.moved_at) == ("prefill", 500.0 - 30.0 + 1)
    assert planner.remembered(gone, 7, 30.0, seen, PlanState())[0] == seen
    arrived = replace(seen, members=(*seen.members, PlanMember("x", PREFILL)))
    assert planner.remembered(gone, 7, 1.0, arrived, PlanState())[0] == arrived
    ahead, state = planner.remembered(gone, 7, -50.0, seen, PlanState())
    assert (ahead.changing, state.moved_at) == (("x",), 500.0)
    later = replace(seen, at=520.0)
    assert planner.remembered(gone, 8, -50.0, later, state)[1].moved_at == 520.0, "another order"


def test_a_look_that_fails_does_not_end_a_watch(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses = iter([lambda: rig.told.update(workers=[]), lambda: rig.told.update(cluster())])

    def sleep(seconds: float) -> None:
        assert seconds == 5.0
        pause = next(pauses, None)
        if pause is None:
            raise KeyboardInterrupt
        pause()

    monkeypatch.setattr(planner.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        planner.show(REF, PlanSettings(), as_json=True, apply=True)
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 2
    assert "pullfill status" in said.err
