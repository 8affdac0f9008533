"""The planner: what is right, which worker changes its role, how seldom. And orders to do so."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from pullfill.config import ClusterRef
from pullfill.deploy import planner
from pullfill.deploy.operate import check_role
from pullfill.deploy.planner import (
    DECODE,
    PREFILL,
    Observation,
    PlanMember,
    PlanSettings,
    PlanState,
    observe,
    plan,
)
from pullfill.errors import ConfigError, UnavailableError
from pullfill.snapshot import Demand, Report
from pullfill.wire import RoleMove, WorkerRole, WorkerState
from tests.support.workers import record

NOW = PlanSettings(settle_s=0.0)


def moved(found: planner.Plan) -> tuple[str, str]:
    """The worker that changes, and its new role."""
    assert found.move is not None
    return found.move.instance_id, planner.OTHER[found.move.role]


ENOUGH = "each role has enough workers"
NONE_TO_SPARE = "more {} workers are needed, but no other one can be spared"


def seen(
    prefills: int,
    decodes: int,
    *,
    long: float = 0.0,
    streams: float = 0.0,
    backlog_s: float = 0.0,
    at: float = 0.0,
    changing: tuple[str, ...] = (),
) -> Observation:
    """long: prefill workers that prompts keep busy. streams: the sum of all pressures."""
    members = [PlanMember(f"p{n}", PREFILL, 10 - n) for n in range(prefills)]
    members += [PlanMember(f"d{n}", DECODE, 10 - n) for n in range(decodes)]
    each = Demand(
        prefill_demand=long / decodes,
        pressure=streams / decodes,
        streams=streams / decodes,
        backlog_s=backlog_s / decodes,
    )
    demands = {f"d{n}": each for n in range(decodes)}
    return Observation(at, tuple(members), demands, changing)


@pytest.mark.parametrize(
    ("prefills", "long", "backlog_s", "right"),
    [(0, 0.0, 0, 0), (0, 0.001, 0, 1), (1, 0.0, 0, 0), (1, 0.69, 0, 1), (1, 0.71, 0, 2),
     (1, 2.9, 0, 5), (2, 0.5, 0, 1), (1, 0.6, 5, 1), (1, 0.6, 35, 2),
     (2, 0.69, 0, 2)],  # one has nothing to spare
)  # fmt: skip
def test_prefill_workers_for_an_autoscaler(
    prefills: int, long: float, backlog_s: float, right: int
) -> None:
    observation = seen(prefills, 1, long=long, backlog_s=backlog_s)
    assert plan(observation, PlanState(), NOW).prefill.right == right


@pytest.mark.parametrize(("decodes", "streams", "right"), [(1, 0.0, 1), (2, 2.0, 3), (3, 0.5, 1)])
def test_decode_workers_for_an_autoscaler(decodes: int, streams: float, right: int) -> None:
    assert plan(seen(1, decodes, streams=streams), PlanState(), NOW).decode.right == right


def test_the_idlest_worker_changes_to_the_role_that_is_short() -> None:
    found = plan(seen(1, 3, long=1.2, streams=1.0), PlanState(), NOW)
    assert moved(found) == ("d2", PREFILL)
    assert found.reason == "d2 to prefill: 1.7 prefill workers are needed, there: 1"
    found = plan(seen(3, 1, long=0.3, streams=1.4), PlanState(), NOW)
    assert moved(found) == ("p2", DECODE)


@pytest.mark.parametrize(
    ("observation", "why"),
    [
        (seen(1, 3, long=0.3, streams=1.0), ENOUGH),
        (seen(1, 1, long=3.0), NONE_TO_SPARE.format("prefill")),
        (seen(1, 2, long=1.0, streams=2.0), NONE_TO_SPARE.format("prefill and decode")),
        (seen(0, 2, long=0.1, streams=1.5), NONE_TO_SPARE.format("prefill")),
        (seen(0, 2, long=0.005, streams=0.5), NONE_TO_SPARE.format("prefill")),
    ],
)
def test_no_move_without_a_gain(observation: Observation, why: str) -> None:
    found = plan(observation, PlanState(), NOW)
    assert (found.move, found.reason) == (None, why)


def test_the_first_prefill_worker_comes_for_long_prompts_and_the_last_goes_without_them() -> None:
    assert plan(seen(0, 2, long=0.1, streams=0.5), PlanState(), NOW).move
    observation = seen(1, 2, streams=2.5)
    assert moved(plan(observation, PlanState(), NOW)) == ("p0", DECODE)
    assert not plan(observation, PlanState(), replace(NOW, min_prefill=1)).move


def test_only_elastic_workers_change_their_role() -> None:
    observation = seen(1, 3, long=1.2, streams=1.0)
    fixed = tuple(replace(m, elastic=m.instance_id == "d0") for m in observation.members)
    found = plan(replace(observation, members=fixed), PlanState(), NOW)
    assert moved(found) == ("d0", PREFILL)
    fixed = tuple(replace(member, elastic=False) for member in fixed)
    found = plan(replace(observation, members=fixed), PlanState(), NOW)
    assert not found.move
    assert "--elastic" in found.reason


def test_a_shortage_must_last() -> None:
    settings = PlanSettings(settle_s=10.0)
    first = plan(seen(1, 3, long=1.2, at=100.0), PlanState(), settings)
    assert not first.move
    short = "more prefill workers are needed; if that stays so, a worker changes in 10 s"
    assert first.reason == short
    calm = plan(seen(1, 3, long=0.2, at=105.0), first.state, settings)
    again = plan(seen(1, 3, long=1.2, at=106.0), calm.state, settings)
    assert not plan(seen(1, 3, long=1.2, at=115.0), again.state, settings).move
    assert plan(seen(1, 3, long=1.2, at=116.0), again.state, settings).move


def test_pauses_after_a_move_are_longer_before_one_back() -> None:
    settings = PlanSettings(settle_s=0.0, cool_down_s=60.0, reverse_s=120.0)
    last = RoleMove(instance_id="p1", after=WorkerRole.PREFILL, at=0.0)
    after = PlanState(last=last)
    assert not plan(seen(2, 3, long=2.0, at=59.0), after, settings).move
    assert plan(seen(2, 3, long=2.0, at=60.0), after, settings).move
    back = seen(2, 3, streams=4.0, at=119.0)
    assert not plan(back, after, settings).move
    assert plan(replace(back, at=120.0), after, settings).move


def test_nobody_is_ordered_while_the_last_one_is_on_its_way_unless_it_died() -> None:
    settings = replace(NOW, cool_down_s=0.0)
    on_its_way = PlanState(last=RoleMove(instance_id="x", after=WorkerRole.PREFILL, at=0.0))
    found = plan(seen(2, 3, long=2.0, at=29.0), on_its_way, settings)
    assert not found.move
    assert "waiting for x to join" in found.reason
    assert plan(seen(2, 3, long=2.0, at=30.0), on_its_way, settings).move


def test_the_observation_is_read_from_the_status() -> None:
    def row(name: str, role: str, state: str, **load: object) -> dict[str, object]:
        return {"instance_id": name, "role": role, "state": state, "load": load}

    told = observe(
        {
            "workers": [
                row("d1", "decode", "ready", requests=3, demand={"pressure": 0.5, "later": 1}),
                row("d2", "decode", "lost"),
                row("d3", "decode", "draining", demand={"pressure": 9.0}),
                row("d4", "decode", "checking", demand={}),  # is one soon: nobody must replace it
                row("p2", "prefill", "checking"),  # maybe for ever
                row("p1", "prefill", "ready", jobs=2, elastic="prefill"),
                row("b1", "decode", "ready", requests=1, elastic="both", demand={}),
                row("b1", "prefill", "ready", requests=1, elastic="both", demand={}),
                row("s1", "prefill", "ready", elastic="prefill", switch="drains"),
            ]
        },
        7.0,
    )
    assert told.members == (
        PlanMember("d1", DECODE, 3, elastic=False),
        PlanMember("p1", PREFILL, 2),
        PlanMember("b1", DECODE, 1),
        PlanMember("s1", PREFILL),
    )
    assert told.demands == {"d1": Demand(pressure=0.5), "b1": Demand()}
    assert (told.at, told.changing) == (7.0, ("d3", "d4", "s1"))


REF = ClusterRef("default", "http://h:1", "nats://h:1")


def look(monkeypatch: pytest.MonkeyPatch, told: dict[str, Any]) -> planner.Plan:
    """One look without --apply. tests/contract/test_operate.py shows what that orders."""
    monkeypatch.setattr(planner, "ask", lambda _: told)
    return planner.look(REF, NOW, PlanState(), apply=False)


def test_json() -> None:
    observation = seen(0, 2, long=0.5, backlog_s=4.0, streams=0.6)
    one = observation.demands["d0"]
    demands = {**observation.demands, "d0": msgspec.structs.replace(one, prompts=8, missed=2)}
    observation = replace(observation, demands=demands)
    told = planner.told(plan(observation, PlanState(), NOW))
    assert json.loads(json.dumps(told)) == told
    assert told["prefill"] == {
        "now": 0,
        "need": pytest.approx(0.714, abs=0.001),
        "right": 1,
        "why": "long prompts keep 0.5 workers busy; each should work 70% of the time; "
        "4.0 s of work wait; 2 of 8 long prompts were computed by decode workers",
    }
    assert "the highest is 0.3, from the streams" in told["decode"]["why"]
    assert (told["backlog_s"], told["missed"]) == (4.0, 0.25)
    assert told["moves"] == [{"instance_id": "d1", "from": "decode", "to": "prefill"}]


def test_without_a_decode_worker_a_prefill_worker_becomes_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two orders at the same time, or one and a death, may leave none."""
    row = {"instance_id": "p", "role": "prefill", "state": "ready", "load": {"elastic": "prefill"}}
    assert moved(look(monkeypatch, {"workers": [row]})) == ("p", DECODE)
    for nobody in ([row | {"load": {}}], []):
        with pytest.raises(UnavailableError, match="pullfill status"):
            look(monkeypatch, {"workers": nobody})


# ------------------------------------------------------------------ orders


ELASTIC = Report(load={"elastic": "decode"})


def order(wanted: WorkerRole, report: Report | None = ELASTIC, **how: Any) -> None:
    """Order `worker-1`, which decodes. others: more workers."""
    mine = record("worker-1", role="decode")
    check_role([mine, *how.pop("others", ())], mine, report, wanted, force=how.pop("force", False))


@pytest.mark.parametrize(
    ("report", "others", "why"),
    [
        (Report(), [record("decode-1")], "start it with --elastic"),
        (None, [record("decode-1")], "does not answer"),
        (ELASTIC, [], "only decode worker"),
        (ELASTIC, [record("prefill-1")], "only decode worker"),
        (ELASTIC, [record("decode-1", state=WorkerState.DRAINING)], "only decode worker"),
    ],
    ids=["not elastic", "silent", "alone", "prefill", "draining"],
)
def test_what_is_refused(report: Report | None, others: list[Any], why: str) -> None:
    with pytest.raises((ConfigError, UnavailableError), match=why):
        order(WorkerRole.PREFILL, report, others=others)
    if report is ELASTIC:
        order(WorkerRole.PREFILL, others=others, force=True)
        order(WorkerRole.PREFILL, others=[*others, record("decode-2")])
        order(WorkerRole.BOTH, others=others)
