"""How many workers of each kind are right: for `pullfill plan`, and for autoscalers.

    observe   what the cluster tells → Observation
    plan      Observation, PlanSettings → Plan

A need is told in workers. Long prompts need prefill workers: those that they keep busy all the
time, over `prefill_use`, and more while a backlog waits. Streams need decode workers: the sum of
all pressures (decode_worker/demand.py), over `decode_use`. Workers with both sides do what is left
of both needs. `Need.right` is for an autoscaler, which adds and removes workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from pullfill.options import flag
from pullfill.snapshot import Cluster, Demand

# Kinds of workers, named by the command that starts one. BOTH has both sides.
PREFILL, DECODE, BOTH = "prefill", "decode", "worker"


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

    kind: str
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


def observe(cluster: Cluster) -> Observation:
    """Return what counts. A worker that does not report counts as gone."""
    ready: dict[str, set[str]] = {PREFILL: set(), DECODE: set()}
    demands = {}
    for row in cluster.workers:
        if row.state != "ready" or row.role not in ready:
            continue
        ready[row.role].add(row.instance_id)
        told = row.load.get("demand")
        if row.role == DECODE and told is not None:
            # Nonsense of one worker must not spoil what the others tell.
            with suppress(msgspec.ValidationError):
                demands[row.instance_id] = msgspec.convert(told, Demand)
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
