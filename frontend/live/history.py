"""The history that the live page draws: a `Point` for each STEP_S seconds of HISTORY_S, and a mark
for what has happened to servers and workers.

Requests that ended come from the request log, which has them anyway. So their part of the history
is there as soon as somebody looks, and changes in the registry are noted always: they are rare.
Tokens, figures of workers and of the queue, and who does not answer, are noted while somebody
looks. `Series` is pure: the caller brings the times.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from pullfill.snapshot import (
    FAILED,
    HISTORY_S,
    STEP_S,
    UNTOLD,
    Cluster,
    Ended,
    Mark,
    Now,
    Point,
    WorkerPoint,
)
from pullfill.wire import WorkerRecord, WorkerState

MAX_MARKS = 200
# Of this many requests in a step the percentiles are taken, at most.
MAX_VALUES = 512
# Steps of the figures of the last minute.
_MINUTE = int(60.0 // STEP_S)


def percentiles(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the median and the 95th percentile, by nearest rank. None: there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[round(0.5 * last)], ordered[round(0.95 * last)]


@dataclass(slots=True)
class _Step:
    """What is known of one step. looked: seconds in which `tokens` of answers came."""

    done: int = 0
    good: int = 0
    tokens: float = 0.0
    looked: float = 0.0
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    decisions: Counter[str] = field(default_factory=Counter)
    backlog_s: float | None = None
    workers: Mapping[str, WorkerPoint] = field(default_factory=dict)


class Series:
    """The points."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}

    def ended(self, row: Ended) -> None:
        """Count a request that has an answer. They may come in any order."""
        if row.at is None or row.path == FAILED:
            return
        step = self._step(row.at)
        step.done += 1
        step.good += bool(row.good)
        step.decisions[f"{row.path} {row.reason}"] += 1
        if row.ttft_ms is not None and len(step.ttft) < MAX_VALUES:
            step.ttft.append(row.ttft_ms)
        if row.itl_ms is not None and len(step.itl) < MAX_VALUES:
            step.itl.append(row.itl_ms)

    def sampled(
        self,
        at: float,
        seconds: float,
        tokens: float,
        backlog_s: float | None,
        workers: Mapping[str, WorkerPoint],
    ) -> None:
        """Note what was seen in the `seconds` before `at`. tokens: of answers."""
        step = self._step(at)
        step.tokens += tokens
        step.looked += seconds
        step.backlog_s, step.workers = backlog_s, workers

    def points(self, now: float, steps: int | None = None) -> tuple[Point, ...]:
        """Return the last `steps` points, oldest first. None: all. Forget what is too old."""
        current = int(now // STEP_S)
        oldest = current - int(HISTORY_S // STEP_S) + 1
        for index in [index for index in self._steps if index < oldest]:
            del self._steps[index]
        first = oldest if steps is None else max(oldest, current - steps + 1)
        return tuple(
            self._point(index, now)
            for index in range(first, current + 1)
            if index in self._steps or steps is not None
        )

    def now(self, now: float, tokens_per_s: float) -> Now:
        """Return the figures of the last minute. tokens_per_s: measured by the caller."""
        last = int(now // STEP_S)
        steps = [s for i in range(last - _MINUTE, last + 1) if (s := self._steps.get(i))]
        seconds = now - (last - _MINUTE) * STEP_S
        return Now(
            ttft_ms=percentiles([value for step in steps for value in step.ttft]),
            itl_ms=percentiles([value for step in steps for value in step.itl]),
            tokens_per_s=tokens_per_s,
            done_per_s=sum(step.done for step in steps) / seconds,
            good_per_s=sum(step.good for step in steps) / seconds,
        )

    def _step(self, at: float) -> _Step:
        return self._steps.setdefault(int(at // STEP_S), _Step())

    def _point(self, index: int, now: float) -> Point:
        step = self._steps.get(index) or _Step()
        return Point(
            at=index * STEP_S,
            seconds=max(0.5, min(STEP_S, now - index * STEP_S)),
            done=step.done,
            good=step.good,
            tokens_per_s=step.tokens / step.looked if step.looked else None,
            ttft_ms=percentiles(step.ttft),
            itl_ms=percentiles(step.itl),
            decisions=dict(step.decisions),
            backlog_s=step.backlog_s,
            workers=dict(step.workers),
        )


# --------------------------------------------------------------------------- marks


class Marks:
    """What has happened. clock: seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._over: deque[Mark] = deque(maxlen=MAX_MARKS)
        self._open: dict[tuple[str, str], Mark] = {}

    def on_change(self, old: WorkerRecord | None, new: WorkerRecord | None) -> None:
        """Note a change in the registry (`Directory.subscribe`)."""
        now = self._clock()
        if new is None:
            assert old is not None
            self._end("drain", old.instance_id, now)
            self._end("lost", old.instance_id, now)
            self._over.append(Mark(at=now, kind="left", who=old.instance_id))
            return
        if old is None:
            self._over.append(Mark(at=now, kind="joined", who=new.instance_id, text=new.role))
        elif new.restarts > old.restarts or new.pid != old.pid:
            self._over.append(Mark(at=now, kind="restarted", who=new.instance_id))
        if new.state is WorkerState.DRAINING:
            self._begin("drain", new.instance_id, now)
        elif old is not None and old.state is WorkerState.DRAINING:
            self._end("drain", new.instance_id, now)

    def seen(self, cluster: Cluster) -> None:
        """Note which workers and servers do not answer."""
        now = self._clock()
        lost = {row.instance_id for row in cluster.workers if row.state == WorkerState.LOST}
        for kind, who in [*self._open]:
            # A worker may also have left after it was asked.
            if kind == "lost" and who not in lost:
                self._end(kind, who, now)
        for who in lost:
            self._begin("lost", who, now, "it does not answer")
        for name, status in cluster.servers.items():
            if status.up:
                self._end("outage", name, now - status.since_s)
            elif status.error != UNTOLD:
                self._begin("outage", name, now - status.since_s, status.error or "")

    def marks(self) -> tuple[Mark, ...]:
        """Return the marks of the history, oldest first."""
        oldest = self._clock() - HISTORY_S
        over = [mark for mark in self._over if (mark.until or mark.at) >= oldest]
        return tuple(sorted([*over, *self._open.values()], key=lambda mark: mark.at))

    def _begin(self, kind: str, who: str, at: float, text: str = "") -> None:
        self._open.setdefault((kind, who), Mark(at=at, kind=kind, who=who, text=text))

    def _end(self, kind: str, who: str, at: float) -> None:
        if (mark := self._open.pop((kind, who), None)) is not None:
            self._over.append(replace(mark, until=at))
