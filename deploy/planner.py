"""`pullfill plan`: how many workers of each role are right, and which one should change its role.

    observe   what the cluster tells → Observation
    plan      Observation, PlanState, PlanSettings → Plan, with the PlanState for the next look
    show      asks the cluster, plans, prints, and with `--apply` orders what is planned

A need is told in workers. Long prompts need prefill workers: those that they keep busy all the
time, over `prefill_use`, and more while a backlog waits. Streams need decode workers: the sum of
all pressures (decode_worker/demand.py), over `decode_use`. `Need.right` is for an autoscaler, which
adds and removes workers. A move is for a fixed number of workers: one of them changes its role.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import msgspec
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from pullfill.config import ClusterRef
from pullfill.deploy import operate
from pullfill.deploy.members import AsJson, ask_etcd
from pullfill.deploy.status import ask
from pullfill.errors import PullfillError, UnavailableError
from pullfill.options import Flag, flag
from pullfill.registry.client import EtcdClient
from pullfill.registry.directory import last_move, note_move
from pullfill.runtime.log import complain
from pullfill.snapshot import Demand
from pullfill.wire import RoleMove, WorkerRole

# --------------------------------------------------------------------------- the plan

PREFILL, DECODE = "prefill", "decode"
OTHER = {PREFILL: DECODE, DECODE: PREFILL}
# For a smaller need, no decode worker becomes a prefill worker.
_TRACE = 0.01


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What the planner aims at.

    prefill_use: share of the time that a prefill worker should work. The rest is for bursts.
    decode_use: pressure that a decode worker should have.
    backlog_s: a backlog of at most so many seconds needs no more prefill workers.
    drain_s: seconds within which a longer backlog should be gone.
    band: share by which a move must make the worse role better. An autoscaler may remove a worker
    only if the others have this part of a worker to spare.
    settle_s: how long the same move must be right. So moves do not oscillate.
    cool_down_s, reverse_s: pause before the next move, and before one in the other direction. The
    second is never shorter.
    absent_s: how long to wait for a worker that was ordered to change and is not registered.
    min_decode, min_prefill: least number of workers that stay."""

    prefill_use: float = flag(
        0.7, "Share of time a prefill worker should work", metavar="SHARE", least=0.05, most=1
    )
    decode_use: float = flag(
        0.8, "How full a decode worker should be; 1: full", metavar="SHARE", least=0.05, most=1
    )
    backlog_s: float = 5.0
    drain_s: float = 30.0
    band: float = 0.15
    settle_s: float = 10.0
    cool_down_s: float = flag(
        20.0, "--apply waits at least S seconds after a change", metavar="S", least=0
    )
    reverse_s: float = 120.0
    absent_s: float = 30.0
    min_decode: int = flag(1, "--apply keeps at least N decode workers", metavar="N", least=1)
    min_prefill: int = flag(0, "--apply keeps at least N prefill workers", metavar="N", least=0)


@dataclass(frozen=True, slots=True)
class PlanMember:
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
    changing: ids of workers that change their role, join or leave."""

    at: float
    members: tuple[PlanMember, ...]
    demands: Mapping[str, Demand]
    changing: tuple[str, ...] = ()

    def of(self, role: str) -> list[PlanMember]:
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
class PlanState:
    """What one look at the cluster passes to the next one.

    wanted, since: the role that should get a worker, and since when. Empty: neither.
    last, revision: the last order of any planner, and the revision of its key in etcd.
    moved_at: when this planner has seen that order first. Clocks of machines differ."""

    wanted: str = ""
    since: float = 0.0
    last: RoleMove | None = None
    revision: int = 0
    moved_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """One look at the cluster.

    backlog_s: the sum of all backlogs. missed: share of long prompts computed by decode workers.
    move: the worker that should change to the other role now. reason: why, or why there is none."""

    prefill: Need
    decode: Need
    backlog_s: float
    missed: float
    state: PlanState
    move: PlanMember | None = None
    reason: str = ""


def observe(status: Mapping[str, Any], at: float) -> Observation:
    """Read the object of `GET /pullfill/status`. A worker that does not report counts as gone."""
    members, demands, changing = [], {}, []
    rows = status["workers"]
    decodes = {row["instance_id"] for row in rows if row["role"] == DECODE}
    for row in rows:
        name, load = row["instance_id"], row.get("load") or {}
        # A decode worker is checked for half a minute at most, a prefill worker maybe for ever.
        joins = row["role"] == DECODE and row["state"] == "checking"
        if row["state"] == "draining" or joins or "switch" in load:
            changing.append(name)
        if row["state"] != "ready" or row["role"] not in OTHER:
            continue
        # A worker that is both has two rows. It is a decode worker here: its streams go first.
        if row["role"] == PREFILL and name in decodes:
            continue
        busy = int(load.get("requests", 0)) + int(load.get("jobs", 0))
        members.append(PlanMember(name, row["role"], busy, "elastic" in load))
        if row["role"] == DECODE and "demand" in load:
            demands[name] = msgspec.convert(load["demand"], Demand)
    return Observation(at, tuple(members), demands, tuple(dict.fromkeys(changing)))


def plan(seen: Observation, state: PlanState, settings: PlanSettings) -> Plan:
    """Return what is right now. The caller carries out `move`, or passes `state` as it was."""
    told = list(seen.demands.values())
    backlog = sum(one.backlog_s for one in told)
    prompts, missed = sum(one.prompts for one in told), sum(one.missed for one in told)
    prefill, decode = _prefill(seen, backlog, prompts, missed, settings), _decode(seen, settings)
    found = Plan(prefill, decode, backlog, missed / prompts if prompts else 0.0, state)
    able = {member.role for member in seen.members if member.elastic}
    to = _better(prefill, decode, settings, able)
    if not to:
        short = [need.role for need in (prefill, decode) if need.need > need.now]
        why = "each role has enough workers"
        if short:
            why = f"more {' and '.join(short)} workers are needed, but no other one can be spared"
        if short and not able:
            why += " (only workers with --elastic can change their role)"
        return replace(found, reason=why, state=replace(state, wanted=""))
    if state.wanted != to:
        state = replace(state, wanted=to, since=seen.at)
    if why := _not_yet(seen, state, settings, to):
        return replace(found, reason=why, state=state)
    givers = [member for member in seen.of(OTHER[to]) if member.elastic]
    one = min(givers, key=lambda member: (member.busy, member.instance_id))
    need = prefill if to == PREFILL else decode
    why = f"{one.instance_id} to {to}: {need.need:.2g} {to} workers are needed, there: {need.now}"
    return replace(found, move=one, reason=why, state=replace(state, wanted=""))


def _prefill(
    seen: Observation, backlog: float, prompts: int, missed: int, settings: PlanSettings
) -> Need:
    now = len(seen.of(PREFILL))
    busy = sum(one.prefill_demand for one in seen.demands.values())
    late = max(0.0, backlog - settings.backlog_s) * max(1, now) / settings.drain_s
    need = busy / settings.prefill_use + late
    right = _right(now, need, settings.min_prefill, settings.band)
    why = f"long prompts keep {busy:.2g} workers busy; each should work {settings.prefill_use:.0%}"
    why += f" of the time; {backlog:.1f} s of work wait"
    if missed:
        why += f"; {missed} of {prompts} long prompts were computed by decode workers"
    return Need(PREFILL, now, need, right, why)


def _decode(seen: Observation, settings: PlanSettings) -> Need:
    # A decode worker that has just started reports nothing yet. It is taken for idle.
    now, told = len(seen.of(DECODE)), list(seen.demands.values())
    pressure = sum(one.pressure for one in told)
    need = pressure / settings.decode_use
    right = _right(now, need, settings.min_decode, settings.band)
    why = "no decode worker reports"
    if told:
        one = max(told, key=lambda one: one.pressure)
        parts = {"streams": one.streams, "KV cache": one.kv, "number of requests": one.seats}
        why = f"the mean pressure is {pressure / len(told):.2g}, {settings.decode_use:.2g} is right"
        why += f"; the highest is {one.pressure:.2g}, from the {max(parts, key=parts.__getitem__)}"
    return Need(DECODE, now, need, right, why)


def _right(now: int, need: float, least: int, band: float) -> int:
    """Return the number of workers for a need. It falls only if that leaves `band` to spare."""
    if need <= 0:  # no long prompt came for a while
        return least
    # Any need asks for one worker.
    wanted = max(1, least, math.ceil(need))
    return wanted if wanted > now else max(wanted, min(now, math.ceil(need + band)))


def _better(prefill: Need, decode: Need, settings: PlanSettings, able: set[str]) -> str:
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


def _not_yet(seen: Observation, state: PlanState, settings: PlanSettings, to: str) -> str:
    """Return why a move has to wait. Empty: now is the time."""
    short = f"more {to} workers are needed"
    changing, last = list(seen.changing), state.last
    left = state.since + settings.settle_s - seen.at
    if last is not None:
        arrived = any(
            (m.instance_id, m.role) == (last.instance_id, last.after) for m in seen.members
        )
        # Between its two roles a worker is registered in none. It may also have died.
        if not arrived and seen.at - state.moved_at < settings.absent_s:
            changing.append(last.instance_id)
        pause = settings.cool_down_s
        if last.after != to:
            pause = max(pause, settings.reverse_s)
        left = max(left, state.moved_at + pause - seen.at)
    if changing:
        names = ", ".join(dict.fromkeys(changing))
        return f"{short}; waiting for {names} to join, to drain or to change its role"
    return f"{short}; if that stays so, a worker changes in {left:.0f} s" if left > 0 else ""


# --------------------------------------------------------------------------- the command


def show(
    ref: ClusterRef,
    settings: PlanSettings,
    *,
    as_json: AsJson = False,
    watch_s: Annotated[float, Flag("Look again every S seconds", metavar="S", least=0)] = 0.0,
    apply: Annotated[
        bool, Flag("Change the roles of --elastic workers, one at a time, and watch")
    ] = False,
) -> int:
    """Print the plan, once or until interrupted. Return the exit code.

    Raises PullfillError if the first look fails, e.g. because no decode worker tells its demand."""
    console, state, looked = Console(), PlanState(), False
    watch_s = watch_s or (5.0 if apply else 0.0)
    while True:
        try:
            found = look(ref, settings, state, apply=apply)
        except PullfillError as exc:
            if not looked:
                raise
            complain(exc)
        else:
            looked, state = True, found.state
            if as_json:
                print(json.dumps(told(found)), flush=True)
            else:
                console.print(shown(found))
        if not watch_s:
            return 0
        time.sleep(watch_s)


def look(ref: ClusterRef, settings: PlanSettings, state: PlanState, *, apply: bool) -> Plan:
    """Ask the cluster, and plan. apply: order the move if there is one."""
    last, revision = ask_etcd(ref, last_move) if apply else (None, 0)
    seen = observe(ask(ref), time.monotonic())
    # Without a decode worker no request is served, so a prefill worker must become one.
    rescue = not seen.of(DECODE) and any(member.elastic for member in seen.of(PREFILL))
    if not seen.demands and not rescue:
        raise UnavailableError(
            "no decode worker says how much it has to do: see `pullfill status`, or start one with "
            "`pullfill decode`"
        )
    if revision != state.revision:
        state = replace(state, last=last, revision=revision, moved_at=seen.at)
    found = plan(seen, state, settings)
    if not apply or (move := found.move) is None:
        # Without --apply nobody makes the move, so it stays wanted.
        return found if found.move is None else replace(found, state=state)
    after = WorkerRole(OTHER[move.role])

    async def carry_out(etcd: EtcdClient, namespace: str) -> bool:
        # Noted first: other planners find it there, and so does this one after a restart. If it
        # dies between note and order, no role changes, and the pause passes.
        noted = RoleMove(instance_id=move.instance_id, after=after, at=time.time())
        if not await note_move(etcd, namespace, noted, revision):
            return False
        await operate.order(etcd, namespace, move.instance_id, after)
        return True

    if ask_etcd(ref, carry_out):
        return found
    why = "another planner has ordered a change of role at this moment"
    return replace(found, move=None, reason=why, state=state)


def told(found: Plan) -> dict[str, Any]:
    """Return the plan for JSON. moves: with `--apply`, those that were ordered in this look."""
    result: dict[str, Any] = {"backlog_s": found.backlog_s, "missed": found.missed}
    for need in (asdict(found.prefill), asdict(found.decode)):
        result[need.pop("role")] = need
    moves = (found.move,) if found.move else ()
    result["moves"] = [
        {"instance_id": one.instance_id, "from": one.role, "to": OTHER[one.role]} for one in moves
    ]
    return result | {"reasons": [found.reason]}


def shown(found: Plan) -> Group:
    """Return a table with a line for each role, and what to do."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("role", "now", "needed", "right", "why"):
        table.add_column(column, justify="left" if column in ("role", "why") else "right")
    for need in (found.prefill, found.decode):
        right = Text(str(need.right), style="" if need.right == need.now else "yellow")
        table.add_row(need.role, str(need.now), f"{need.need:.2f}", right, need.why)
    return Group(table, Text(f"change of role: {found.reason}"))
