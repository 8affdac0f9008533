"""`pullfill plan`: how many workers are right, and why.

    observe   what the cluster tells → Observation
    plan      Observation, PlanSettings → Plan
    show      asks the cluster, plans, and prints

A need is told in workers. Long prompts need prefill workers: those that they keep busy all the
time, over `prefill_use`, and more while a backlog waits. Streams need decode workers: the sum of
all pressures (decode_worker/demand.py), over `decode_use`. Workers with both sides do what is left
of both needs. `Need.right` is for an autoscaler, which adds and removes workers.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pullfill.config import ClusterRef
from pullfill.deploy.members import AsJson
from pullfill.deploy.status import ask
from pullfill.errors import PullfillError, UnavailableError
from pullfill.options import Flag, flag
from pullfill.runtime.log import complain
from pullfill.snapshot import Demand

# --------------------------------------------------------------------------- the plan

PREFILL, DECODE, BOTH = "prefill", "decode", "both"


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What the planner aims at.

    prefill_use: share of the time that a prefill worker should work. The rest is for bursts.
    decode_use: pressure that a decode worker should have.
    backlog_s: a backlog of at most so many seconds needs no more prefill workers.
    drain_s: seconds within which a longer backlog should be gone.
    band: an autoscaler may remove a worker only if the others have this part of a worker to spare.
    min_decode, min_prefill: least number of workers that are right."""

    prefill_use: float = flag(
        0.7, "Share of time a prefill worker should work", metavar="SHARE", least=0.05, most=1
    )
    decode_use: float = flag(
        0.8, "How full a decode worker should be; 1: full", metavar="SHARE", least=0.05, most=1
    )
    backlog_s: float = 5.0
    drain_s: float = 30.0
    band: float = 0.15
    min_decode: int = flag(1, "At least N decode workers are right", metavar="N", least=1)
    min_prefill: int = flag(0, "At least N prefill workers are right", metavar="N", least=0)


@dataclass(frozen=True, slots=True)
class Observation:
    """What is known of the cluster.

    prefills, decodes, both: number of workers that are ready, by the sides that they have.
    demands: what each decode side tells, by instance id."""

    prefills: int
    decodes: int
    both: int
    demands: Mapping[str, Demand]


@dataclass(frozen=True, slots=True)
class Need:
    """What workers of one kind are needed for.

    now: number of these workers.
    need: number of workers that the work would keep as busy as they should be.
    right: number of workers for an autoscaler.
    why: the figures behind `need`, for people."""

    role: str
    now: int
    need: float
    right: int
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """One look at the cluster.

    backlog_s: the sum of all backlogs. missed: share of long prompts computed by decode workers."""

    needs: tuple[Need, ...]
    backlog_s: float
    missed: float


def observe(status: Mapping[str, Any]) -> Observation:
    """Read the object of `GET /pullfill/status`. A worker that does not report counts as gone."""
    ready: dict[str, set[str]] = {PREFILL: set(), DECODE: set()}
    demands = {}
    for row in status["workers"]:
        name, role = row["instance_id"], row["role"]
        if row["state"] != "ready" or role not in ready:
            continue
        ready[role].add(name)
        told = (row.get("load") or {}).get("demand")
        if role == DECODE and told is not None:
            demands[name] = msgspec.convert(told, Demand)
    both = ready[PREFILL] & ready[DECODE]
    prefills, decodes = len(ready[PREFILL] - both), len(ready[DECODE] - both)
    return Observation(prefills, decodes, len(both), demands)


def plan(seen: Observation, settings: PlanSettings) -> Plan:
    """Return what is right now."""
    told = list(seen.demands.values())
    backlog = sum(one.backlog_s for one in told)
    prompts, missed = sum(one.prompts for one in told), sum(one.missed for one in told)
    needs = [_prefill(seen, backlog, prompts, missed, settings), _decode(seen, settings)]
    if seen.both:
        rest = sum(max(0.0, one.need - one.now) for one in needs)
        right = _right(seen.both, rest, 1, settings.band)
        why = "the needs that workers with one side leave"
        needs = [replace(one, right=min(one.right, one.now)) for one in needs]
        needs.append(Need(BOTH, seen.both, rest, right, why))
    return Plan(tuple(needs), backlog, missed / prompts if prompts else 0.0)


def _prefill(
    seen: Observation, backlog: float, prompts: int, missed: int, settings: PlanSettings
) -> Need:
    now = seen.prefills
    busy = sum(one.prefill_demand for one in seen.demands.values())
    able = max(1, now + seen.both)
    late = max(0.0, backlog - settings.backlog_s) * able / settings.drain_s
    need = busy / settings.prefill_use + late
    right = _right(now, need, settings.min_prefill, settings.band)
    why = f"long prompts keep {busy:.2g} workers busy; each should work {settings.prefill_use:.0%}"
    why += f" of the time; {backlog:.1f} s of work wait"
    if missed:
        why += f"; {missed} of {prompts} long prompts were computed by decode workers"
    return Need(PREFILL, now, need, right, why)


def _decode(seen: Observation, settings: PlanSettings) -> Need:
    # A decode worker that has just started reports nothing yet. It is taken for idle.
    now, told = seen.decodes, list(seen.demands.values())
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


# --------------------------------------------------------------------------- the command


def show(
    ref: ClusterRef,
    settings: PlanSettings,
    *,
    as_json: AsJson = False,
    watch_s: Annotated[float, Flag("Look again every S seconds", metavar="S", least=0)] = 0.0,
) -> int:
    """Print the plan, once or until interrupted. Return the exit code.

    Raises PullfillError if the first look fails, e.g. because no decode worker tells its demand."""
    console, looked = Console(), False
    while True:
        try:
            found = look(ref, settings)
        except PullfillError as exc:
            if not looked:
                raise
            complain(exc)
        else:
            looked = True
            if as_json:
                print(json.dumps(told(found)), flush=True)
            else:
                console.print(shown(found))
        if not watch_s:
            return 0
        time.sleep(watch_s)


def look(ref: ClusterRef, settings: PlanSettings) -> Plan:
    """Ask the cluster, and plan."""
    seen = observe(ask(ref))
    if not seen.demands:
        raise UnavailableError(
            "no decode worker says how much it has to do: see `pullfill status`, or start one with "
            "`pullfill decode`"
        )
    return plan(seen, settings)


def told(found: Plan) -> dict[str, Any]:
    """Return the plan for JSON."""
    result: dict[str, Any] = {"backlog_s": found.backlog_s, "missed": found.missed}
    for need in map(asdict, found.needs):
        result[need.pop("role")] = need
    return result


def shown(found: Plan) -> Table:
    """Return a table with a line for each kind of worker."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("role", "now", "needed", "right", "why"):
        table.add_column(column, justify="left" if column in ("role", "why") else "right")
    for need in found.needs:
        right = Text(str(need.right), style="" if need.right == need.now else "yellow")
        table.add_row(need.role, str(need.now), f"{need.need:.2f}", right, need.why)
    return table
