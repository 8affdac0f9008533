"""What is measured on one started system: its warm-up, its idle time, and the windows of each part.

A part is a function of a `Session`; it leaves windows in it. `Scale` says how long and how often,
`FULL_PARTS` which part is measured on which system.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.live import BenchError
from benchmarks.serving import stats, workloads
from benchmarks.serving.contract import Kind, Name, Running, System
from benchmarks.serving.meter import Meter, Use
from benchmarks.serving.window import Window, explain, measure
from benchmarks.serving.workloads import Longs, Prompts, Workload

CONTROL, LONGS, ALONE = "control", "longs", "alone"
SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Scale:
    """Seconds of the windows, and the size of the chat."""

    control_s: float = 8.0
    longs_s: float = 18.0
    conversations: int = 3
    turns: int = 6
    idle_s: float = 5.0


FULL, QUICK = Scale(), Scale(longs_s=16.0, conversations=2, turns=4, idle_s=4.0)


@dataclass(slots=True)
class Session:
    """One start of one system.

    say: prints a line of progress. windows: the windows of the whole campaign so far."""

    system: System
    running: Running
    scale: Scale
    vocabulary: range
    repeat: int
    say: Callable[[str], None]
    windows: list[Window] = field(default_factory=list)
    idle: Use | None = None

    def prompts(self, part: str, label: str) -> Prompts:
        """The same for every system, others in every window and repeat."""
        mine = (self.system.name, self.repeat, part)
        before = sum((w.system, w.repeat, w.part) == mine for w in self.windows)
        return Prompts(self.vocabulary, part, label, self.repeat, before)

    def measure(self, part: str, label: str, workload: Workload, *, keep: bool = True) -> Window:
        """Raises BenchError when nothing at all was answered: the system is of no use."""
        self.say(f"{part}, {label}")
        window = measure(self.running, part, label, self.repeat, workload)
        bad = stats.failed(window.answers)
        if bad:
            self.say(f"  {len(bad)} of {len(window.answers)} failed, first: {bad[0].error[:200]}")
        if keep:
            self.say(f"  {summary(window)}")
            self.windows.append(window)
        if len(bad) == len(window.answers):
            raise BenchError(f"{part}, {label}: every request failed: {bad[0].error[:300]}")
        return window

    def explain(self, window: Window) -> None:
        if self.system.ours:
            explain(window, self.running.url)


def summary(window: Window) -> str:
    """A window in one line, for those who watch."""
    gaps, longs = stats.spread(window.gaps()), stats.ttfts(window.answers, Kind.LONG)
    parts = [f"{len(window.answers)} answers"]
    if gaps.count:
        parts.append(f"ITL p50 {1e3 * gaps.p50:.1f} p99 {1e3 * gaps.p99:.1f} ms")
    if longs:
        parts.append(f"long TTFT p50 {1e3 * stats.spread(longs).p50:.0f} ms")
    if not window.quiet:
        parts.append(f"NOT QUIET: others {100 * window.others:.0f} %")
    return ", ".join(parts)


Part = Callable[[Session], None]


def warm_up(session: Session) -> None:
    """Every shape that will be measured, by every path that can be taken."""
    lengths = sorted({workloads.CHAT_FIRST, workloads.LONG_IN})
    tell = session.running.set_policy
    for policy in ["always_remote", "always_local"] if tell else [""]:
        if tell:
            tell(policy)
        prompts = session.prompts("warm-up", policy)
        session.measure("warm-up", policy, workloads.warm_up(prompts, lengths), keep=False)
    if tell:
        tell("conditional")


def idle(session: Session) -> None:
    """CPU while nothing is asked."""
    session.say("idle")
    time.sleep(SETTLE_S)
    meter = Meter(session.running.pids)
    time.sleep(session.scale.idle_s)
    session.idle = meter.read()


def interference(session: Session) -> None:
    """Control and longs in turn; which comes first changes from repeat to repeat."""
    second = ALONE if session.system.name == Name.ONE_CORE else LONGS
    labels = [CONTROL, second] if session.repeat % 2 == 0 else [second, CONTROL]
    for label in labels:
        seconds = session.scale.control_s if label == CONTROL else session.scale.longs_s
        prompts = session.prompts("interference", label)
        lanes = 0 if label == ALONE else workloads.LANES
        workload = workloads.interference(
            prompts, seconds, None if label == CONTROL else Longs(), lanes
        )
        window = session.measure("interference", label, workload)
        if label == LONGS:
            session.explain(window)


def chat(session: Session) -> None:
    scale = session.scale
    workload = workloads.chat(session.prompts("chat", ""), scale.conversations, scale.turns)
    session.explain(session.measure("chat", "", workload))


RUN: dict[str, Part] = {"interference": interference, "chat": chat}

FULL_PARTS: dict[str, tuple[str, ...]] = {
    "interference": tuple(Name),
    "chat": (Name.PULLFILL, Name.NIXL, Name.ROUND_ROBIN, Name.AGGREGATED),
}
QUICK_PARTS: dict[str, tuple[str, ...]] = {**FULL_PARTS, "chat": (Name.PULLFILL,)}
