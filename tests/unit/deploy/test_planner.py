"""The planner: how many workers of each kind are right."""

from __future__ import annotations

import json
import math

import msgspec
import pytest

from pullfill.config import ClusterRef
from pullfill.deploy import planner
from pullfill.errors import UnavailableError
from pullfill.needs import BOTH, DECODE, PREFILL, Observation, PlanSettings, observe, plan
from pullfill.snapshot import Cluster, Demand, WorkerRow

USUAL = PlanSettings()


def right(observation: Observation, settings: PlanSettings = USUAL) -> dict[str, int]:
    """How many workers of each kind are right."""
    return {need.kind: need.right for need in plan(observation, settings).needs}


def seen(
    prefills: int,
    decodes: int,
    both: int = 0,
    *,
    long: float = 0.0,
    streams: float = 0.0,
    backlog_s: float = 0.0,
    queued_s: float = 0.0,
) -> Observation:
    """long: prefill workers that prompts keep busy. Of the others, the sums of all workers.
    streams: pressures."""
    able = decodes + both
    each = Demand(
        prefill_demand=long / able,
        pressure=streams / able,
        streams=streams / able,
        backlog_s=backlog_s / able,
        queued_s=queued_s / able,
    )
    names = [f"d{n}" for n in range(able)]
    return Observation(prefills, decodes, set(names[:both]), dict.fromkeys(names, each))


@pytest.mark.parametrize(
    ("prefills", "long", "backlog_s", "wanted"),
    [(0, 0.0, 0, 0), (0, 0.001, 0, 1), (1, 0.0, 0, 0), (1, 0.69, 0, 1), (1, 0.71, 0, 2),
     (1, 2.9, 0, 5), (2, 0.5, 0, 1), (1, 0.6, 5, 1), (1, 0.6, 35, 2),
     (2, 0.69, 0, 2)],  # one has nothing to spare
)  # fmt: skip
def test_prefill_workers_for_an_autoscaler(
    prefills: int, long: float, backlog_s: float, wanted: int
) -> None:
    assert right(seen(prefills, 1, long=long, backlog_s=backlog_s))[PREFILL] == wanted


@pytest.mark.parametrize(("decodes", "streams", "wanted"), [(1, 0.0, 1), (2, 2.0, 3), (3, 0.5, 1)])
def test_decode_workers_for_an_autoscaler(decodes: int, streams: float, wanted: int) -> None:
    assert right(seen(1, decodes, streams=streams))[DECODE] == wanted


@pytest.mark.parametrize(
    ("observation", "wanted"),
    [
        (seen(0, 0, 2, long=0.7, streams=0.8), 2),  # of each need, one
        (seen(0, 0, 2, long=0.7, streams=1.2), 3),
        (seen(0, 0, 4, long=0.35, streams=0.2), 1),
        (seen(1, 1, 1, long=1.4, streams=0.8), 1),  # the workers with one side do the rest
        (seen(0, 0, 2), 1),
        # What waits is 5 s for both of them, and then 20 s more: 40 s of work of one, in 30 s.
        (seen(0, 0, 2, long=0.7, streams=0.4, queued_s=10), 2),
        (seen(0, 0, 2, long=0.7, streams=0.4, queued_s=50), 3),
        # Of the prompts that they computed themselves none waits.
        (seen(0, 0, 2, long=0.7, streams=0.4, backlog_s=50), 2),
    ],
)
def test_workers_with_both_sides_do_what_is_left(observation: Observation, wanted: int) -> None:
    found = right(observation)
    assert found[BOTH] == wanted
    assert found[PREFILL] <= observation.prefills
    assert found[DECODE] <= observation.decodes


def test_the_least_numbers_are_kept() -> None:
    assert right(seen(0, 1), PlanSettings(min_prefill=2, min_decode=3)) == {PREFILL: 2, DECODE: 3}


def test_the_observation_is_read_from_the_status() -> None:
    def row(name: str, role: str, state: str, **load: object) -> WorkerRow:
        return WorkerRow(instance_id=name, role=role, state=state, load=load)

    rows = (
        row("d1", "decode", "ready", demand={"pressure": 0.5, "later": 1}),
        row("d2", "decode", "lost"),
        row("d3", "decode", "draining", demand={"pressure": 9.0}),
        row("d4", "decode", "checking", demand={}),
        row("d5", "decode", "ready"),  # has just started
        row("d6", "decode", "ready", demand={"pressure": "high"}),
        row("d7", "decode", "ready", demand={"backlog_s": math.nan}),
        row("d8", "decode", "ready", demand={"queued_s": math.inf}),
        row("p1", "prefill", "ready", jobs=2),
        row("b1", "decode", "ready", demand={}),
        row("b1", "prefill", "ready"),
        row("f1", "frontend", "ready"),
    )
    expected = Observation(1, 5, {"b1"}, {"d1": Demand(pressure=0.5), "b1": Demand()})
    assert observe(Cluster(workers=rows)) == expected


def test_json() -> None:
    observation = seen(0, 2, long=0.5, backlog_s=4.0, streams=0.6)
    one = observation.demands["d0"]
    demands = {**observation.demands, "d0": msgspec.structs.replace(one, prompts=8, missed=2)}
    told = planner.told(plan(Observation(0, 2, set(), demands), USUAL))
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


def test_why_workers_with_both_sides_are_needed() -> None:
    need = plan(seen(1, 1, 1, long=1.4, streams=0.8), USUAL).needs[-1]
    assert need.why == "1.00 to prefill and 0.00 to decode are left by workers with one side"


def test_without_a_decode_worker_nobody_tells_a_need(monkeypatch: pytest.MonkeyPatch) -> None:
    row = WorkerRow(instance_id="p", role="prefill", state="ready")
    monkeypatch.setattr(planner, "ask", lambda _: Cluster(workers=(row,)))
    with pytest.raises(UnavailableError, match="pullfill status"):
        planner.look(ClusterRef("default", "http://h:1", "nats://h:1"), USUAL)
