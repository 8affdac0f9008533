"""How many workers of each role are right, and which one should change its role: pure functions.

    observe   what the cluster tells → Observation
    plan      Observation, State, Settings → Plan, with the State for the next look

A need is told in workers. Long prompts need prefill workers: those that they keep busy all the
time, over `prefill_use`, and more while a backlog waits. Streams need decode workers: the sum of
all pressures (decode_worker/demand.py), over `decode_use`. A role is short if its need is over the
number of its workers.

`Need.right` is for an autoscaler, which adds and removes workers. A move is for a fixed number of
workers: one of them changes its role. It does so if a role is short, and if the move makes the
worse of the two roles better by `band`. These rules keep moves from oscillating:

    one worker at a time, and none while another one changes its role
    the same move must be right for `settle_s`
    the next move comes after `cool_down_s`, one in the other direction after `reverse_s`
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from pullfill.snapshot import Demand

PREFILL, DECODE = "prefill", "decode"
_TRACE = 0.01
"""For a smaller need, no decode worker becomes a prefill worker."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the planner aims at.

    prefill_use: share of the time that a prefill worker should work. The rest is for bursts.
    decode_use: pressure that a decode worker should have.
    backlog_s: a backlog of at most so many seconds needs no more prefill workers.
    drain_s: seconds within which a longer backlog should be gone.
    band: share by which a move must make the worse role better. An autoscaler may remove a worker
    only if the others have this part of a worker to spare.
    settle_s, cool_down_s, reverse_s: see the module.
    min_decode, min_prefill: least number of workers that stay."""

    prefill_use: float = 0.7
    decode_use: float = 0.8
    backlog_s: float = 5.0
    drain_s: float = 30.0
    band: float = 0.15
    settle_s: float = 10.0
    cool_down_s: float = 20.0
    reverse_s: float = 120.0
    min_decode: int = 1
    min_prefill: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """One worker that is ready.

    busy: number of requests and jobs that it has. elastic: whether it can change its role."""

    instance_id: str
    role: str
    busy: int = 0
    elastic: bool = True


@dataclass(frozen=True, slots=True)
class Observation:
    """What is known of the cluster at the time `at`, in seconds of a monotonic clock.

    demands: what each decode worker tells, by instance id.
    changing: ids of workers that change their role, or leave."""

    at: float
    members: tuple[Member, ...]
    demands: Mapping[str, Demand]
    changing: tuple[str, ...] = ()

    def of(self, role: str) -> list[Member]:
        return [member for member in self.members if member.role == role]


@dataclass(frozen=True, slots=True)
class Need:
    """What one role needs.

    now: number of its workers.
    need: number of workers that its work would keep as busy as they should be.
    right: number of workers for an autoscaler.
    why: the figures behind `need`, for people."""

    role: str
    now: int
    need: float
    right: int
    why: str


@dataclass(frozen=True, slots=True)
class Move:
    """One worker changes its role."""

    instance_id: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class State:
    """What one look at the cluster passes to the next one.

    wanted, since: the role that should get a worker, and since when. Empty: neither.
    moved_to, moved_at: the new role of the worker that moved last, and when.
    noted: the revision in etcd of the last order that was taken into account."""

    wanted: str = ""
    since: float = 0.0
    moved_to: str = ""
    moved_at: float = -math.inf
    noted: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """One look at the cluster.

    backlog_s: the sum of all backlogs. missed: share of long prompts computed by decode workers.
    moves: what to do now, one move at most. reasons: why, or why there is no move."""

    prefill: Need
    decode: Need
    backlog_s: float
    missed: float
    moves: tuple[Move, ...] = ()
    reasons: tuple[str, ...] = ()
    state: State = field(default_factory=State)


def observe(status: Mapping[str, Any], at: float) -> Observation:
    """Read the object of `GET /pullfill/status`. A worker that does not report counts as gone.

    A worker that is both has two rows. It counts as a decode worker, since its streams go first."""
    members, demands, changing = [], {}, []
    rows = status["workers"]
    decodes = {row["instance_id"] for row in rows if row["role"] == DECODE}
    for row in rows:
        name, load = row["instance_id"], row.get("load") or {}
        if row["state"] == "draining" or "switch" in load:
            changing.append(name)
        if row["state"] != "ready" or row["role"] not in (PREFILL, DECODE):
            continue
        if row["role"] == PREFILL and name in decodes:
            continue
        busy = int(load.get("requests", 0)) + int(load.get("jobs", 0))
        members.append(Member(name, row["role"], busy, "elastic" in load))
        if row["role"] == DECODE and "demand" in load:
            demands[name] = msgspec.convert(load["demand"], Demand)
    return Observation(at, tuple(members), demands, tuple(dict.fromkeys(changing)))


def plan(seen: Observation, state: State, settings: Settings) -> Plan:
    """Return what is right now. The caller carries out `moves`, or passes `state` as it was."""
    told = list(seen.demands.values())
    backlog = sum(one.backlog_s for one in told)
    prompts, missed = sum(one.prompts for one in told), sum(one.missed for one in told)
    prefill = _prefill(seen, told, backlog, prompts, missed, settings)
    decode = _decode(seen, told, settings)
    found = Plan(prefill, decode, backlog, missed / prompts if prompts else 0.0, state=state)
    able = {member.role for member in seen.members if member.elastic}
    to = _better(prefill, decode, settings, able)
    if not to:
        short = [need.role for need in (prefill, decode) if need.need > need.now]
        why = "each role has enough workers"
        if short:
            why = f"more {' and '.join(short)} workers are needed, but no other one can be spared"
        if short and not able:
            why += " (only workers with --elastic can change their role)"
        return replace(found, reasons=(why,), state=replace(state, wanted=""))
    if state.wanted != to:
        state = replace(state, wanted=to, since=seen.at)
    if why := _not_yet(seen, state, settings, to):
        return replace(found, reasons=(why,), state=state)
    before = DECODE if to == PREFILL else PREFILL
    givers = [member for member in seen.of(before) if member.elastic]
    one = min(givers, key=lambda member: (member.busy, member.instance_id))
    move = Move(one.instance_id, before, to)
    need = prefill if to == PREFILL else decode
    why = f"{one.instance_id} to {to}: {need.need:.2g} {to} workers are needed, there: {need.now}"
    done = State(moved_to=to, moved_at=seen.at)
    return replace(found, moves=(move,), reasons=(why,), state=done)


def _prefill(
    seen: Observation,
    told: list[Demand],
    backlog: float,
    prompts: int,
    missed: int,
    settings: Settings,
) -> Need:
    now = len(seen.of(PREFILL))
    busy = sum(one.prefill_demand for one in told)
    late = max(0.0, backlog - settings.backlog_s) * max(1, now) / settings.drain_s
    need = busy / settings.prefill_use + late
    right = _right(now, need, settings.min_prefill, settings.band)
    why = f"long prompts keep {busy:.2g} workers busy; each should work {settings.prefill_use:.0%}"
    why += f" of the time; {backlog:.1f} s of work wait"
    if missed:
        why += f"; {missed} of {prompts} long prompts were computed by decode workers"
    return Need(PREFILL, now, need, right, why)


def _decode(seen: Observation, told: list[Demand], settings: Settings) -> Need:
    now = len(seen.of(DECODE))
    # A decode worker that has just started reports nothing yet. It is taken for idle.
    need = sum(one.pressure for one in told) / settings.decode_use
    right = _right(now, need, settings.min_decode, settings.band)
    why = "no decode worker reports"
    if told:
        fullest = max(told, key=lambda one: one.pressure)
        parts = {
            "streams": fullest.streams,
            "KV cache": fullest.kv,
            "number of requests": fullest.seats,
        }
        part = max(parts, key=lambda name: parts[name])
        mean = sum(one.pressure for one in told) / len(told)
        why = f"the mean pressure is {mean:.2g}, {settings.decode_use:.2g} is right"
        why += f"; the highest is {fullest.pressure:.2g}, from the {part}"
    return Need(DECODE, now, need, right, why)


def _right(now: int, need: float, least: int, band: float) -> int:
    """Return the number of workers for a need. It falls only if that leaves `band` to spare.

    Any need asks for one worker. There is no need at all if no long prompt came for a while."""
    if need <= 0:
        return least
    wanted = max(1, least, math.ceil(need))
    return wanted if wanted > now else max(wanted, min(now, math.ceil(need + band)))


def _better(prefill: Need, decode: Need, settings: Settings, able: set[str]) -> str:
    """Return the role that should get a worker of the other one. Empty: neither.

    able: the roles that have a worker which can change."""
    now = _worst(prefill.need, prefill.now, decode.need, decode.now, settings.band)
    if now <= 1.0:
        return ""
    options = {}
    if decode.now > settings.min_decode and DECODE in able:
        options[PREFILL] = prefill.now + 1, decode.now - 1
    # The last prefill worker stays while long prompts come.
    least = max(settings.min_prefill, int(prefill.need >= _TRACE))
    if prefill.now > least and PREFILL in able:
        options[DECODE] = prefill.now - 1, decode.now + 1
    worst = {
        to: _worst(prefill.need, p, decode.need, d, settings.band) for to, (p, d) in options.items()
    }
    best = min(worst, key=lambda to: worst[to], default="")
    return best if best and worst[best] < now * (1.0 - settings.band) else ""


def _worst(prefill: float, prefills: int, decode: float, decodes: int, band: float) -> float:
    """Return the need for each worker, of the role where it is higher."""
    if decodes == 0:
        return math.inf
    if prefills:
        return max(prefill / prefills, decode / decodes)
    # Decode workers do all work. With long prompts the result is always high enough for a move, so
    # that one of them becomes a prefill worker if it can be spared.
    together = (prefill + decode) / decodes
    return together if prefill < _TRACE else max(together, 1.001 / (1.0 - band))


def _not_yet(seen: Observation, state: State, settings: Settings, to: str) -> str:
    """Return why a move has to wait. Empty: now is the time."""
    short = f"more {to} workers are needed"
    if seen.changing:
        return f"{short}; waiting for {', '.join(seen.changing)} to drain or to change its role"
    pause = settings.cool_down_s if state.moved_to in ("", to) else settings.reverse_s
    left = max(
        state.moved_at + pause - seen.at if state.moved_to else 0.0,
        state.since + settings.settle_s - seen.at,
    )
    return f"{short}; if that stays so, a worker changes in {left:.0f} s" if left > 0 else ""
