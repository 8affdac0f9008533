"""How many workers of each role are right, and which one should change sides: pure functions.

    observe   what the cluster tells → Observation
    plan      Observation, State, Settings → Plan, with the State for the next look

A need is told in workers. Long prompts need prefill workers: those that they keep busy all the
time, over `prefill_use`, and more while a backlog waits. Streams need decode workers: the sum of
all pressures (decode_worker/demand.py), over `decode_use`. A role is short if its need is over the
number of its workers.

`Need.right` is for an autoscaler, which adds and removes workers. A move is for a fixed number of
workers: one of them changes sides if a role is short and the worse of the two roles gets better by
`band`. Moves do not oscillate:

    one worker at a time, and none while another one changes sides
    the same move must be right for `settle_s`
    the next move comes after `cool_down_s`, one back after `reverse_s`
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from pullfill.cluster_status import Demand

PREFILL, DECODE = "prefill", "decode"
_TRACE = 0.01
"""A smaller need for prefill workers is none that a decode worker should change sides for."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the planner aims at.

    prefill_use: share of the time that a prefill worker should work. The rest is for bursts.
    decode_use: pressure that a decode worker should have.
    backlog_s: seconds of queued work that are no reason for more prefill workers.
    drain_s: within so many seconds a longer backlog should be gone.
    band: share by which a move must make things better, and of a worker by which a role must have
    too many.
    settle_s, cool_down_s, reverse_s: see the module.
    min_decode, min_prefill: number of workers that remain at least."""

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

    busy: requests or jobs that it has. elastic: whether it can change sides."""

    instance_id: str
    role: str
    busy: int = 0
    elastic: bool = True


@dataclass(frozen=True, slots=True)
class Observation:
    """What is known of the cluster at the time `at`, in seconds of a monotonic clock.

    demands: what each decode worker tells, by instance id.
    changing: workers that are on their way to the other role, or leave."""

    at: float
    members: tuple[Member, ...]
    demands: Mapping[str, Demand]
    changing: tuple[str, ...] = ()

    def of(self, role: str) -> list[Member]:
        return [member for member in self.members if member.role == role]


@dataclass(frozen=True, slots=True)
class Need:
    """What one role needs.

    now: number of its workers. need: workers that its work would keep as busy as they should be.
    right: number of workers for an autoscaler. why: the figures behind that, in a sentence."""

    role: str
    now: int
    need: float
    right: int
    why: str


@dataclass(frozen=True, slots=True)
class Move:
    """One worker changes sides."""

    instance_id: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class State:
    """What a look leaves to the next one.

    wanted: the role that got short first, and has been since `since`.
    moved_to, moved_at: the role of the last move, and when it was made."""

    wanted: str = ""
    since: float = 0.0
    moved_to: str = ""
    moved_at: float = -math.inf


@dataclass(frozen=True, slots=True)
class Plan:
    """One look at the cluster.

    moves: what to do now, one move at most. reasons: why, or why nothing is done."""

    prefill: Need
    decode: Need
    backlog_s: float
    missed: float
    moves: tuple[Move, ...] = ()
    reasons: tuple[str, ...] = ()
    state: State = field(default_factory=State)


def observe(status: Mapping[str, Any], at: float) -> Observation:
    """Read the object of `GET /pullfill/status`. A worker that does not report counts as gone.

    One that is both has two rows, and counts as a decode worker: streams come first there."""
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
        why = f"{' and '.join(short)}: no worker to spare" if short else "no role is short"
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
    why = f"{one.instance_id} to {to}: {need.need:.2g} {to} workers are needed, {need.now} there"
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
    why = "none reports"
    if told:
        fullest = max(told, key=lambda one: one.pressure)
        parts = {"streams": fullest.streams, "KV cache": fullest.kv, "seats": fullest.seats}
        part = max(parts, key=lambda name: parts[name])
        mean = sum(one.pressure for one in told) / len(told)
        why = f"the mean pressure is {mean:.2g}, {settings.decode_use:.2g} is right"
        why += f"; the highest is {fullest.pressure:.2g}, from the {part}"
    return Need(DECODE, now, need, right, why)


def _right(now: int, need: float, least: int, band: float) -> int:
    """The number of workers for a need. Fewer than now only if that leaves `band` to spare.

    Any need is for one worker: no long prompt has come for a while if there is none."""
    if need <= 0:
        return least
    wanted = max(1, least, math.ceil(need))
    return wanted if wanted > now else max(wanted, min(now, math.ceil(need + band)))


def _better(prefill: Need, decode: Need, settings: Settings, able: set[str]) -> str:
    """Return the role that should get a worker of the other one. Empty: neither.

    able: the roles of which a worker can change sides."""
    now = _worst(prefill.need, prefill.now, decode.need, decode.now, settings.band)
    if now <= 1.0:
        return ""
    options = {}
    if decode.now > settings.min_decode and DECODE in able:
        options[PREFILL] = prefill.now + 1, decode.now - 1
    # The last prefill worker stays as long as anything is for it.
    least = max(settings.min_prefill, int(prefill.need >= _TRACE))
    if prefill.now > least and PREFILL in able:
        options[DECODE] = prefill.now - 1, decode.now + 1
    worst = {
        to: _worst(prefill.need, p, decode.need, d, settings.band) for to, (p, d) in options.items()
    }
    best = min(worst, key=lambda to: worst[to], default="")
    return best if best and worst[best] < now * (1.0 - settings.band) else ""


def _worst(prefill: float, prefills: int, decode: float, decodes: int, band: float) -> float:
    """Return need over workers of the role that has it worst."""
    if decodes == 0:
        return math.inf
    if prefills:
        return max(prefill / prefills, decode / decodes)
    # Decode workers do all. With long prompts that is worth a move if one of them can be spared.
    together = (prefill + decode) / decodes
    return together if prefill < _TRACE else max(together, 1.001 / (1.0 - band))


def _not_yet(seen: Observation, state: State, settings: Settings, to: str) -> str:
    """Return why a move has to wait. Empty: it has not."""
    if seen.changing:
        return f"{to} is short; {', '.join(seen.changing)} drains or changes sides: waiting for it"
    pause = settings.cool_down_s if state.moved_to in ("", to) else settings.reverse_s
    left = max(
        state.moved_at + pause - seen.at if state.moved_to else 0.0,
        state.since + settings.settle_s - seen.at,
    )
    return f"{to} is short; a move is {left:.0f} s away if it stays so" if left > 0 else ""
