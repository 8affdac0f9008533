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
from collections.abc import Mapping, Set
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

    prefills, decodes: number of workers that are ready and have this side only.
    both: instance ids of those that have both sides.
    demands: what each decode side tells, by instance id."""

    prefills: int
    decodes: int
    both: Set[str]
    demands: Mapping[str, Demand]

    @property
    def able(self) -> int:
        """Number of workers that prefill for others, and 1 if there are none."""
        return max(1, self.prefills + len(self.both))

    @property
    def backlog_s(self) -> float:
        """Seconds that all these need for the prompts that wait."""
        # With both sides a worker keeps most long prompts while it and the others are busy. So all
        # that it has not computed waits, and not only its jobs.
        return sum(
            one.queued_s / self.able if name in self.both else one.backlog_s
            for name, one in self.demands.items()
        )


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
    return Observation(prefills, decodes, both, demands)


def plan(seen: Observation, settings: PlanSettings) -> Plan:
    """Return what is right now."""
    told = list(seen.demands.values())
    prompts, missed = sum(one.prompts for one in told), sum(one.missed for one in told)
    needs = [_prefill(seen, prompts, missed, settings), _decode(seen, settings)]
    if now := len(seen.both):
        left = {one.kind: max(0.0, one.need - one.now) for one in needs}
        rest = sum(left.values())
        right = _right(now, rest, 1, settings.band)
        why = " and ".join(f"{need:.2f} to {kind}" for kind, need in left.items())
        if seen.prefills or seen.decodes:
            why += " are left by workers with one side"
        needs = [replace(one, right=min(one.right, one.now)) for one in needs]
        needs.append(Need(BOTH, now, rest, right, why))
    return Plan(tuple(needs), seen.backlog_s, missed / prompts if prompts else 0.0)


def _prefill(seen: Observation, prompts: int, missed: int, settings: PlanSettings) -> Need:
    now, backlog = seen.prefills, seen.backlog_s
    busy = sum(one.prefill_demand for one in seen.demands.values())
    late = max(0.0, backlog - settings.backlog_s) * seen.able / settings.drain_s
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
