"""All systems, one after the other, several times: what was measured and what went wrong.

Each system is started fresh for every repeat; who begins changes from repeat to repeat. A system
that fails is a `Trouble` and the others go on.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from benchmarks.live import BenchError
from benchmarks.machine import OtherLoad
from benchmarks.report import median
from benchmarks.serving import parts, stats
from benchmarks.serving.contract import System
from benchmarks.serving.meter import Use
from benchmarks.serving.parts import Scale, Session
from benchmarks.serving.systems_pairs import Skipped
from benchmarks.serving.window import Window

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Trouble:
    """What went wrong; `where`: "start" or the part. skipped: what it needs is not installed."""

    system: str
    repeat: int
    where: str
    what: str
    skipped: bool = False


@dataclass(slots=True)
class Measured:
    """Everything that the campaign has seen."""

    systems: list[System]
    windows: list[Window] = field(default_factory=list)
    idle: dict[str, list[Use]] = field(default_factory=dict)
    ready_s: dict[str, list[float]] = field(default_factory=dict)
    troubles: list[Trouble] = field(default_factory=list)
    quiet: OtherLoad = field(default_factory=OtherLoad)
    """What else used the machine right before each start."""
    cut: bool = False
    """Somebody ended the run before it was over."""

    def of(self, system: str, part: str, label: str = "") -> list[Window]:
        wanted = (system, part, label)
        return [w for w in self.windows if (w.system, w.part, w.label) == wanted]

    def over(
        self, system: str, part: str, label: str, what: Callable[[Window], float]
    ) -> float | None:
        """The median over the windows; None if there are none."""
        values = [what(w) for w in self.of(system, part, label)]
        return median(values) if values else None

    def idle_cores(self, system: str) -> float | None:
        """Cores that all its processes kept busy while nothing was asked."""
        return median([use.cores for use in self.idle[system]]) if system in self.idle else None


@dataclass(slots=True)
class Campaign:
    """scale, parts (part → systems) and repeats: what to do."""

    systems: Sequence[System]
    scale: Scale
    parts: Mapping[str, Sequence[str]]
    repeats: int
    vocabulary: range
    base: Path
    _began: float = field(default_factory=time.monotonic)

    def run(self) -> Measured:
        measured = Measured(list(self.systems))
        turns = [
            (repeat, system)
            for repeat in range(self.repeats)
            for system in rotated(self.systems, repeat)
        ]
        try:
            for number, (repeat, system) in enumerate(turns):
                self._one(measured, system, repeat, number + 1, len(turns))
        except (KeyboardInterrupt, SystemExit):
            self._say("ended early")
            measured.cut = True
        return measured

    def parts_of(self, system: System) -> tuple[str, ...]:
        """In the order in which they run. A system that no part names is measured under
        interference."""
        wanted = [p for p in parts.RUN if system.name in self.parts.get(p, ())]
        if not wanted and "interference" in self.parts:
            wanted = ["interference"]
        return tuple(wanted)

    def _one(
        self, measured: Measured, system: System, repeat: int, number: int, count: int
    ) -> None:
        before, wanted = f"[{number}/{count}] {system.name}", self.parts_of(system)
        if not wanted:
            return
        measured.quiet.look(2.0)
        folder = self.base / f"{repeat}-{system.name}"
        folder.mkdir(parents=True)
        self._say(f"{before}: starts")
        where = "start"
        try:
            with system.launch(folder) as running:
                measured.ready_s.setdefault(system.name, []).append(running.ready_s)
                session = Session(
                    system,
                    running,
                    self.scale,
                    self.vocabulary,
                    repeat,
                    lambda line: self._say(f"{before}: {line}"),
                    measured.windows,
                )
                where = "warm-up"
                parts.warm_up(session)
                parts.idle(session)
                if session.idle:
                    measured.idle.setdefault(system.name, []).append(session.idle)
                for where in wanted:
                    self._part(measured, session, where)
        except Skipped as exc:
            measured.troubles.append(Trouble(system.name, repeat, where, str(exc), skipped=True))
            self._say(f"{before}: left out: {exc}")
        except (BenchError, OSError, subprocess.SubprocessError) as exc:
            measured.troubles.append(Trouble(system.name, repeat, where, str(exc)))
            self._say(f"{before}: {where} FAILED: {str(exc)[-1500:]}")

    def _part(self, measured: Measured, session: Session, part: str) -> None:
        """A part that fails leaves the next ones their chance."""
        try:
            parts.RUN[part](session)
        except BenchError as exc:
            system = session.system.name
            measured.troubles.append(Trouble(system, session.repeat, part, str(exc)))
            session.say(f"{part} FAILED: {exc}")

    def _say(self, line: str) -> None:
        print(f"{time.monotonic() - self._began:5.0f} s {line}", flush=True)


def rotated(systems: Sequence[Item], repeat: int) -> list[Item]:
    """Another one begins in every repeat, and every other repeat runs backwards."""
    at = repeat % len(systems) if systems else 0
    turned = [*systems[at:], *systems[:at]]
    return turned[::-1] if repeat % 2 else turned


def failures(windows: Iterable[Window]) -> dict[tuple[str, str], tuple[int, int, str]]:
    """(system, part) → failed requests, all, and what the first one said; only where any failed."""
    found: dict[tuple[str, str], tuple[int, int, str]] = {}
    for window in windows:
        bad = stats.failed(window.answers)
        count, total, first = found.get((window.system, window.part), (0, 0, ""))
        what = first or (bad[0].error if bad else "")
        found[window.system, window.part] = count + len(bad), total + len(window.answers), what
    return {key: value for key, value in found.items() if value[0]}
