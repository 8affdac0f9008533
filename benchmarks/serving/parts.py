"""What is measured on one started system: its warm-up, its idle time, and the windows of each part.

A part is a function of a `Session`; it leaves windows in it. `Scale` says how long and how often,
`PARTS` which part is measured on which system.
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
LOCAL, REMOTE = "always_local", "always_remote"
SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Scale:
    """pairs: control and interference windows per start. rounds: prompts per length (and per
    policy). rates: requests per second."""

    control_s: float
    longs_s: float
    pairs: int
    lengths: tuple[int, ...]
    rounds: int
    bursts: int
    conversations: int
    turns: int
    rates: tuple[float, ...]
    rate_s: float
    idle_s: float
    longs: Longs = field(default_factory=Longs)


FULL = Scale(
    control_s=8.0,
    longs_s=18.0,
    pairs=1,
    lengths=workloads.LENGTHS,
    rounds=3,
    bursts=2,
    conversations=3,
    turns=6,
    rates=(1.0, 2.0, 4.0),
    rate_s=10.0,
    idle_s=5.0,
)
QUICK = Scale(
    control_s=8.0,
    longs_s=16.0,
    pairs=1,
    lengths=(1024, 4096),
    rounds=4,
    bursts=2,
    conversations=2,
    turns=4,
    rates=(2.0,),
    rate_s=12.0,
    idle_s=4.0,
)


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

    @property
    def tell(self) -> Callable[[str], None] | None:
        """Changes the router's policy; None where it cannot be, or where it is what the system is
        measured for."""
        fixed = self.system.name in (Name.PULLFILL_LOCAL, Name.PULLFILL_REMOTE)
        return None if fixed else self.running.set_policy

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
        if keep:
            self.windows.append(window)
        if len(bad) == len(window.answers):
            raise BenchError(f"{part}, {label}: every request failed: {bad[0].error[:300]}")
        return window

    def explain(self, window: Window) -> None:
        if self.system.ours:
            explain(window, next(iter(self.running.urls.values())))


def summary(window: Window) -> str:
    """A window in one line, for those who watch."""
    gaps, longs = stats.spread(window.gaps()), stats.ttfts(window.answers, Kind.LONG)
    parts = [f"{len(window.answers)} answers"]
    if gaps.count:
        parts.append(f"ITL p50 {1e3 * gaps.p50:.1f} p99 {1e3 * gaps.p99:.1f} ms")
    if longs:
        parts.append(f"long TTFT p50 {1e3 * stats.spread(longs).p50:.0f} ms")
    if not window.quiet:
        parts.append(f"NOT QUIET: others {100 * window.others:.0f} %, steal {window.steal:.3f}")
    return ", ".join(parts)


Part = Callable[[Session], None]


def warm_up(session: Session) -> None:
    """Every shape that will be measured, by every path that can be taken."""
    lengths = sorted({*session.scale.lengths, session.scale.longs.tokens})
    tell = session.tell
    for policy in [REMOTE, LOCAL] if tell else [""]:
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
    for label in labels * session.scale.pairs:
        seconds = session.scale.control_s if label == CONTROL else session.scale.longs_s
        prompts = session.prompts("interference", label)
        lanes = 0 if label == ALONE else workloads.LANES
        workload = workloads.interference(
            prompts, seconds, None if label == CONTROL else session.scale.longs, lanes
        )
        window = session.measure("interference", label, workload)
        if label == LONGS:
            session.explain(window)


def solo(session: Session) -> None:
    """TTFT of one long prompt. Where the router can be told, local and remote in turn, round by
    round, on the same workers."""
    scale, tell = session.scale, session.tell
    if tell is None:
        prompts = session.prompts("solo", "")
        _solo(session, "", workloads.solo(prompts, scale.lengths, scale.rounds))
        return
    for number in range(scale.rounds):
        order = [LOCAL, REMOTE] if number % 2 == 0 else [REMOTE, LOCAL]
        for policy in order:
            tell(policy)
            prompts = session.prompts("solo", policy)
            _solo(session, policy, workloads.solo(prompts, scale.lengths, 1))
    tell("conditional")


def _solo(session: Session, label: str, workload: Workload) -> None:
    session.explain(session.measure("solo", label, workload))


def bursts(session: Session) -> None:
    workload = workloads.bursts(session.prompts("bursts", ""), session.scale.bursts)
    session.explain(session.measure("bursts", "", workload))


def chat(session: Session) -> None:
    scale = session.scale
    workload = workloads.chat(session.prompts("chat", ""), scale.conversations, scale.turns)
    session.explain(session.measure("chat", "", workload))


def rates(session: Session) -> None:
    for rate in session.scale.rates:
        prompts = session.prompts("rates", f"{rate:g}")
        session.measure("rates", f"{rate:g}", workloads.sweep(prompts, rate, session.scale.rate_s))


RUN: dict[str, Part] = {
    "interference": interference,
    "solo": solo,
    "bursts": bursts,
    "chat": chat,
    "rates": rates,
}

_BASE = (Name.AGGREGATED, Name.AGGREGATED_256, Name.ROUND_ROBIN, Name.NIXL, Name.PULLFILL)
_ALL = (
    *_BASE,
    Name.NIXL_APART,
    Name.PULLFILL_LOCAL,
    Name.PULLFILL_REMOTE,
    Name.HAND_SPLIT,
    Name.ONE_CORE,
)

FULL_PARTS: dict[str, tuple[str, ...]] = {
    "interference": _ALL,
    "solo": (Name.PULLFILL, Name.NIXL, Name.NIXL_APART, Name.AGGREGATED, Name.ONE_CORE),
    "bursts": (Name.PULLFILL_2P1D, Name.PULLFILL, Name.ROUND_ROBIN, Name.AGGREGATED),
    "chat": (Name.PULLFILL, Name.NIXL, Name.ROUND_ROBIN, Name.AGGREGATED),
    "rates": _BASE,
}
QUICK_PARTS: dict[str, tuple[str, ...]] = {
    "interference": _ALL,
    "solo": (Name.PULLFILL,),
    "chat": (Name.PULLFILL,),
}


def seconds_of(part: str, system: str, scale: Scale) -> float:
    """About how long a part takes, for the progress line."""
    drain = 1.5
    tokens = sum(scale.lengths)
    match part:
        case "interference":
            return scale.pairs * (scale.control_s + scale.longs_s + 2 * drain)
        case "solo":
            paths = 2 if system.startswith(Name.PULLFILL) else 1
            return scale.rounds * paths * (tokens * 6e-4 + 1.0)
        case "bursts":
            return scale.bursts * workloads.BURST_EVERY_S + drain
        case "chat":
            return scale.turns * 2.0 + drain
        case _:
            return len(scale.rates) * (scale.rate_s + drain)
