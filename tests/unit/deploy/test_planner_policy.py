"""The planner's policy: what is right, which worker changes its role, and how seldom."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from pullfill.deploy.planner import (
    DECODE,
    PREFILL,
    Move,
    Observation,
    PlanMember,
    PlanSettings,
    PlanState,
    observe,
    plan,
)
from pullfill.snapshot import Demand

NOW = PlanSettings(settle_s=0.0)
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
    ("prefills", "long", "right"),
    [
        (0, 0.0, 0),
        (0, 0.001, 1),
        (0, 0.1, 1),
        (1, 0.0, 0),
        (1, 0.001, 1),
        (1, 0.69, 1),
        (1, 0.71, 2),
        (1, 2.9, 5),
        (2, 0.69, 2),  # one would do, with nothing to spare
        (2, 0.5, 1),
        (5, 0.5, 1),
    ],
)
def test_prefill_workers_for_an_autoscaler(prefills: int, long: float, right: int) -> None:
    assert plan(seen(prefills, 1, long=long), PlanState(), NOW).prefill.right == right


def test_a_backlog_asks_for_more_until_it_is_gone() -> None:
    assert plan(seen(1, 1, long=0.6, backlog_s=5.0), PlanState(), NOW).prefill.right == 1
    assert plan(seen(1, 1, long=0.6, backlog_s=35.0), PlanState(), NOW).prefill.right == 2


@pytest.mark.parametrize(("decodes", "streams", "right"), [(1, 0.0, 1), (2, 2.0, 3), (3, 0.5, 1)])
def test_decode_workers_for_an_autoscaler(decodes: int, streams: float, right: int) -> None:
    found = plan(seen(1, decodes, streams=streams), PlanState(), NOW)
    assert found.decode.right == right


def test_the_idlest_worker_changes_to_the_role_that_is_short() -> None:
    found = plan(seen(1, 3, long=1.2, streams=1.0), PlanState(), NOW)
    assert found.moves == (Move("d2", DECODE, PREFILL),)
    assert found.reasons == ("d2 to prefill: 1.7 prefill workers are needed, there: 1",)
    found = plan(seen(3, 1, long=0.3, streams=1.4), PlanState(), NOW)
    assert found.moves == (Move("p2", PREFILL, DECODE),)


@pytest.mark.parametrize(
    ("observation", "why"),
    [
        (seen(1, 3, long=0.3, streams=1.0), ENOUGH),
        (seen(1, 1, long=3.0), NONE_TO_SPARE.format("prefill")),
        (seen(1, 2, long=1.0, streams=2.0), NONE_TO_SPARE.format("prefill and decode")),
        (seen(1, 2, long=0.8, streams=1.0), NONE_TO_SPARE.format("prefill")),
        (seen(0, 2, long=0.1, streams=1.5), NONE_TO_SPARE.format("prefill")),
    ],
)
def test_no_move_without_a_gain(observation: Observation, why: str) -> None:
    found = plan(observation, PlanState(), NOW)
    assert (found.moves, found.reasons) == ((), (why,))


def test_long_prompts_get_a_first_prefill_worker_if_one_can_be_spared() -> None:
    assert plan(seen(0, 2, long=0.1, streams=0.5), PlanState(), NOW).moves
    assert not plan(seen(0, 2, streams=0.5), PlanState(), NOW).moves
    assert not plan(seen(0, 2, long=0.005, streams=0.5), PlanState(), NOW).moves, "hardly any"


def test_the_last_prefill_worker_goes_when_nothing_is_for_it() -> None:
    observation = seen(1, 2, streams=2.5)
    assert plan(observation, PlanState(), NOW).moves == (Move("p0", PREFILL, DECODE),)
    assert not plan(observation, PlanState(), replace(NOW, min_prefill=1)).moves


def test_only_elastic_workers_change_their_role() -> None:
    observation = seen(1, 3, long=1.2, streams=1.0)
    fixed = tuple(replace(m, elastic=m.instance_id == "d0") for m in observation.members)
    found = plan(replace(observation, members=fixed), PlanState(), NOW)
    assert found.moves == (Move("d0", DECODE, PREFILL),)
    fixed = tuple(replace(member, elastic=False) for member in fixed)
    found = plan(replace(observation, members=fixed), PlanState(), NOW)
    assert not found.moves
    assert "--elastic" in found.reasons[0]


def test_the_last_decode_worker_stays() -> None:
    for least in (1, 2):
        observation = seen(1, least, long=30.0)
        assert not plan(observation, PlanState(), replace(NOW, min_decode=least)).moves


def test_a_shortage_must_last() -> None:
    settings = PlanSettings(settle_s=10.0)
    first = plan(seen(1, 3, long=1.2, at=100.0), PlanState(), settings)
    assert not first.moves
    assert first.reasons == (
        "more prefill workers are needed; if that stays so, a worker changes in 10 s",
    )
    calm = plan(seen(1, 3, long=0.2, at=105.0), first.state, settings)
    again = plan(seen(1, 3, long=1.2, at=106.0), calm.state, settings)
    assert not plan(seen(1, 3, long=1.2, at=115.0), again.state, settings).moves
    assert plan(seen(1, 3, long=1.2, at=116.0), again.state, settings).moves


def test_pauses_after_a_move_are_longer_before_one_back() -> None:
    settings = PlanSettings(settle_s=0.0, cool_down_s=60.0, reverse_s=120.0)
    moved = plan(seen(1, 4, long=2.0, at=0.0), PlanState(), settings).state
    assert moved.moved_to == PREFILL
    assert not plan(seen(2, 3, long=2.0, at=59.0), moved, settings).moves
    assert plan(seen(2, 3, long=2.0, at=60.0), moved, settings).moves
    back = seen(2, 3, streams=4.0, at=119.0)
    assert not plan(back, moved, settings).moves
    assert plan(replace(back, at=120.0), moved, settings).moves


def wave(settings: PlanSettings, *, period_s: float, periods: int) -> list[tuple[float, Move]]:
    """Five workers under a square wave: long prompts, then streams. Returns the moves."""
    prefills, decodes, state = 1, 4, PlanState()
    moves = []
    for second in range(int(period_s * periods)):
        is_long = second % period_s < period_s / 2
        long, streams = (2.0, 0.8) if is_long else (0.2, 3.0)
        now = seen(prefills, decodes, long=long, streams=streams, at=float(second))
        found = plan(now, state, settings)
        state = found.state
        for move in found.moves:
            moves.append((float(second), move))
            step = 1 if move.after == PREFILL else -1
            prefills, decodes = prefills + step, decodes - step
    return moves


@pytest.mark.parametrize("period_s", [2.0, 20.0, 60.0, 120.0, 240.0])
def test_a_fast_wave_moves_no_more_than_the_pauses_allow(period_s: float) -> None:
    settings = PlanSettings()
    moves = wave(settings, period_s=period_s, periods=math.ceil(1200 / period_s))
    pairs = list(itertools.pairwise(moves))
    for (first, one), (second, other) in pairs:
        pause = settings.cool_down_s if one.after == other.after else settings.reverse_s
        assert second - first >= pause
    backs = sum(one.after != other.after for (_, one), (_, other) in pairs)
    assert backs <= 1200 / settings.reverse_s
    if period_s <= settings.settle_s:
        assert not moves


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
