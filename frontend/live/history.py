"""The history that the live page draws: a `Point` for each STEP_S seconds of HISTORY_S, and a mark
for what has happened to servers and workers.

Requests that ended come from the request log, which has them anyway. So their part of the history
is there as soon as somebody looks, and changes in the registry are noted always: they are rare.
Figures of workers and of the queue, and who does not answer, are noted while somebody looks.

`Series` is pure: the caller brings the times.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

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


def percentiles(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the median and the 95th percentile, by nearest rank. None: there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[round(0.5 * last)], ordered[round(0.95 * last)]


@dataclass(slots=True)
class _Step:
    """What is known of one step. looked: seconds of it in which tokens were counted as they came.

    Tokens of other times are spread over the time in which an answer was generated."""

    done: int = 0
    good: int = 0
    counted: float = 0.0
    looked: float = 0.0
    spread: float = 0.0
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    decisions: Counter[str] = field(default_factory=Counter)
    backlog_s: float | None = None
    workers: dict[str, WorkerPoint] = field(default_factory=dict)


class TokenMeter:
    """Counts the tokens of answers between two looks, by decode worker.

    Nothing is counted as tokens come: a look sums up the answers under way and those that ended."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Nobody looks any more. The next look is a first one."""
        self._at: float | None = None
        self._ended: Counter[str] = Counter()
        self._total: Counter[str] = Counter()

    def look(
        self, now: float, answers: Iterable[tuple[str, int]], ended: Iterable[Ended]
    ) -> tuple[float, dict[str, int]]:
        """Return the seconds since the last look, and the tokens by worker. A first look: 0, {}.

        now: a monotonic clock. answers: worker and tokens of each answer under way.
        ended: those that have ended since the last look."""
        first, seconds = self._at is None, now - (self._at or now)
        if not first:
            for row in ended:
                self._ended[row.decode] += row.made
        total = Counter(self._ended)
        for worker, tokens in answers:
            total[worker] += tokens
        before, self._total, self._at = self._total, total, now
        if first or seconds <= 0:
            return 0.0, {}
        # Tokens of an answer that was cancelled, or has moved, are gone from the sum.
        return seconds, {name: max(0, count - before[name]) for name, count in total.items()}


class Series:
    """The points."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._recent: deque[Ended] = deque(maxlen=4 * MAX_VALUES)

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
        self._spread(row)

    def recent(self, rows: Iterable[Ended]) -> None:
        """Remember requests for the figures of the last minute, oldest first."""
        self._recent.extend(r for r in rows if r.at is not None and r.path != FAILED)

    def _spread(self, row: Ended) -> None:
        assert row.at is not None
        seconds = max(0.0, (row.total_ms or 0.0) - (row.ttft_ms or 0.0)) / 1e3
        first, last = int((row.at - seconds) // STEP_S), int(row.at // STEP_S)
        first = max(first, last - int(HISTORY_S // STEP_S))
        for index in range(first, last + 1):
            self._steps.setdefault(index, _Step()).spread += row.made / (last - first + 1)

    def sampled(
        self,
        at: float,
        seconds: float,
        tokens: float,
        backlog_s: float | None,
        workers: Mapping[str, WorkerPoint],
    ) -> None:
        """Note what was seen in the `seconds` before `at`. tokens: of answers."""
        step, before = self._step(at), self._step(at - STEP_S)
        part = min(seconds, at % STEP_S)
        step.counted += tokens * part / seconds
        step.looked += part
        rest = min(seconds - part, STEP_S)  # with many workers the looks are many steps apart
        before.counted += tokens * rest / seconds
        before.looked += rest
        step.backlog_s = backlog_s
        step.workers = dict(workers)

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
        while self._recent and (self._recent[0].at or 0.0) < now - 60.0:
            self._recent.popleft()
        rows = self._recent
        seconds = 60.0
        if len(rows) == rows.maxlen:  # the minute had more of them than are remembered
            seconds = max(0.1, now - (rows[0].at or 0.0))
        return Now(
            ttft_ms=percentiles([row.ttft_ms for row in rows if row.ttft_ms is not None]),
            itl_ms=percentiles([row.itl_ms for row in rows if row.itl_ms is not None]),
            tokens_per_s=tokens_per_s,
            done_per_s=len(rows) / seconds,
            good_per_s=sum(bool(row.good) for row in rows) / seconds,
        )

    # ---------------------------------------------------------------- inside

    def _step(self, at: float) -> _Step:
        return self._steps.setdefault(int(at // STEP_S), _Step())

    def _point(self, index: int, now: float) -> Point:
        step = self._steps.get(index) or _Step()
        seconds = max(0.5, min(STEP_S, now - index * STEP_S))
        looked = step.looked >= 0.5
        return Point(
            at=index * STEP_S,
            seconds=seconds,
            done=step.done,
            good=step.good,
            tokens_per_s=step.counted / step.looked if looked else step.spread / seconds,
            ttft_ms=percentiles(step.ttft),
            itl_ms=percentiles(step.itl),
            decisions=dict(step.decisions),
            backlog_s=step.backlog_s,
            workers=step.workers,
        )


# --------------------------------------------------------------------------- marks


@dataclass(slots=True)
class _Event:
    at: float
    kind: str
    who: str
    text: str = ""
    until: float | None = None


class Marks:
    """What has happened. clock: seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._events: list[_Event] = []
        self._open: dict[tuple[str, str], _Event] = {}

    def on_change(self, old: WorkerRecord | None, new: WorkerRecord | None) -> None:
        """Note a change in the registry (`Directory.subscribe`)."""
        now = self._clock()
        if new is None:
            assert old is not None
            self._end("drain", old.instance_id, now)
            self._end("lost", old.instance_id, now)
            self._add(_Event(now, "left", old.instance_id))
            return
        if old is None:
            self._add(_Event(now, "joined", new.instance_id, new.role))
        elif new.restarts > old.restarts or new.pid != old.pid:
            self._add(_Event(now, "restarted", new.instance_id))
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
        """Return the marks of the history, oldest first. Forget older ones."""
        oldest, lasting = self._clock() - HISTORY_S, {id(each) for each in self._open.values()}
        self._events = [
            event
            for event in self._events
            if id(event) in lasting or (event.until or event.at) >= oldest
        ]
        ordered = sorted(self._events, key=lambda event: event.at)
        return tuple(msgspec.convert(event, Mark, from_attributes=True) for event in ordered)

    # ---------------------------------------------------------------- inside

    def _begin(self, kind: str, who: str, at: float, text: str = "") -> None:
        if (kind, who) not in self._open:
            self._open[kind, who] = event = _Event(at, kind, who, text)
            self._add(event)

    def _end(self, kind: str, who: str, at: float) -> None:
        if (event := self._open.pop((kind, who), None)) is not None:
            event.until = at

    def _add(self, event: _Event) -> None:
        self._events = [*self._events, event][-MAX_MARKS:]
