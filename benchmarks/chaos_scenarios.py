"""What is done to a cluster under load, and what was seen: one `Run` per scenario.

Life of a scenario: all clients start; when half of the requests are over one process gets SIGKILL;
with `restart` another is started in its place RESTART_S later; the clients finish; whatever is
still missing is started again, so that the next scenario finds the cluster whole.
"""

from __future__ import annotations

import math
import signal
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import httpx

from benchmarks.chaos_cluster import ChaosCluster, Freed, logged_at
from benchmarks.chaos_load import Ask, Load, Work
from benchmarks.live import BenchError, wait_for
from tests.support.cluster import Worker

RESTART_S = 3.5
"""Later than the two seconds in which throughput must be back: a start takes a core for itself."""
WARM_S = 2.0
SPOOL_S = 1.0
"""The clients end one by one: the last second of a load says nothing about the cluster."""
WINDOW_S, STEP_S = 1.0, 0.05
"""A rate is counted over the second that follows a moment. A second that ended there would still
contain what came before the fault."""
BACK = 0.8
"""Share of a rate that counts as having it back."""


def rate_at(times: Sequence[float], begin: float, width: float = WINDOW_S) -> float:
    """Events per second in [begin, begin + width). `times` ascending."""
    return (bisect_left(times, begin + width) - bisect_left(times, begin)) / width


def rates(times: Sequence[float], begin: float, end: float) -> list[float]:
    """Of every whole window between the two, side by side; [] when there is none."""
    count = int((end - begin) / WINDOW_S + 1e-9)
    return [rate_at(times, begin + i * WINDOW_S) for i in range(count)]


def back_after(
    times: Sequence[float], moment: float, wanted: float, end: float, share: float = BACK
) -> float | None:
    """Seconds from `moment` to the first window with at least `share` of the rate `wanted`; 0 when
    the second right after it already has it. None when no whole window before `end` has."""
    step = 0
    while (begin := moment + step * STEP_S) + WINDOW_S <= end:
        if rate_at(times, begin) >= share * wanted:
            return begin - moment
        step += 1
    return None


def longest_gap(times: Sequence[float], begin: float, end: float) -> float:
    """The longest stretch between the two without an event, in seconds."""
    inside = [begin, *(t for t in times if begin < t < end), end]
    return max(b - a for a, b in pairwise(inside))


@dataclass(frozen=True, slots=True)
class Scenario:
    """victim: role of the process that is killed; "" for none. outage: it was the only one that
    serves, so requests fail until it is back; what counts is that they do so soon."""

    key: str
    title: str
    victim: str = ""
    restart: bool = False
    outage: bool = False


NO_FAULT = Scenario("none", "no fault")
PREFILL_GONE = Scenario("prefill-gone", "prefill killed, never back", "prefill")
PREFILL_BACK = Scenario("prefill-restarted", "prefill killed and restarted", "prefill", True)
DECODE_BACK = Scenario("decode-restarted", "decode killed and restarted", "decode", True)
ONLY_DECODE_BACK = Scenario(
    "only-decode-restarted", "the only decode worker killed and restarted", "decode", True, True
)
FRONTEND_GONE = Scenario("frontend-gone", "one of two frontends killed", "frontend")


@dataclass(frozen=True, slots=True)
class Topology:
    name: str
    decode: int
    prefill: int
    scenarios: tuple[Scenario, ...]


TOPOLOGIES = (
    Topology("1P1D", 1, 1, (NO_FAULT, PREFILL_GONE, PREFILL_BACK, ONLY_DECODE_BACK, FRONTEND_GONE)),
    Topology("2P2D", 2, 2, (NO_FAULT, PREFILL_BACK, DECODE_BACK, FRONTEND_GONE)),
)


@dataclass(slots=True)
class Run:
    """What one scenario showed. Times of day are time.monotonic; `*_s` count from the kill.

    excused: requests that may fail. Of a killed frontend those that were sent to it and not over
    before the process was gone (the kernel takes a moment to tear it down, and accepts connections
    until then); of an outage those that met it.
    wanted: tokens per second that the processes left can do, measured without a fault, or the rate
    before if that is lower.
    """

    scenario: Scenario
    asks: list[Ask]
    wrong: list[Ask]
    began: float
    ended: float
    killed: float | None = None
    noticed_s: float | None = None
    freed_s: float | None = None
    restarted_s: float | None = None
    excused: list[Ask] = field(default_factory=list)
    wanted: float = 0.0
    turned_away: int = 0
    remote_before: float = 0.0
    remote_after: float = 0.0
    continued: int = 0
    left: str = ""
    times: list[float] = field(default_factory=list)

    @property
    def failed(self) -> list[Ask]:
        return [a for a in self.asks if a.error]

    @property
    def unexpected(self) -> list[Ask]:
        """Failed without an excuse."""
        return [a for a in self.failed if a not in self.excused]

    @property
    def slowest_error_s(self) -> float:
        """Of the excused ones, from the kill or their own begin."""
        killed = self.killed or 0.0
        return max((a.ended - max(a.began, killed) for a in self.excused if a.error), default=0.0)

    def window(self, part: str) -> tuple[float, float]:
        """(begin, end) of `before` the kill, `during` (until somebody takes the dead one's place,
        or the end) and `after` that."""
        end = max(self.ended - SPOOL_S, self.began)
        killed = self.killed if self.killed is not None else end
        restarted = killed + self.restarted_s if self.restarted_s is not None else end
        return {
            "before": (min(self.began + WARM_S, killed), killed),
            "during": (killed, min(restarted, end)),
            "after": (min(restarted, end), end),
        }[part]

    def rate(self, part: str) -> float | None:
        """Median of the tokens per second over one-second windows; None where there is none."""
        found = rates(self.times, *self.window(part))
        return median(found) if found else None

    @property
    def back_s(self) -> float | None:
        """From the notice to the first second with 80 % of `wanted`."""
        if self.killed is None or self.noticed_s is None:
            return None
        return back_after(self.times, self.killed + self.noticed_s, self.wanted, self.ended)

    @property
    def gap_s(self) -> float:
        """The longest silence of all clients together after the kill."""
        return longest_gap(self.times, self.killed or self.began, self.ended - SPOOL_S)

    @property
    def durations(self) -> list[float]:
        return [a.ended - a.began for a in self.asks if not a.error]

    @property
    def first_tokens(self) -> list[float]:
        return [a.at[0] - a.began for a in self.asks if a.at]


class Stage:
    """A cluster that plays scenarios with the same work."""

    def __init__(self, cluster: ChaosCluster, work: Work, clients: int, each: int) -> None:
        self.cluster, self.work = cluster, work
        self.clients, self.each = clients, each
        self._can: dict[str, float] = {}

    def _load(self, each: int) -> Load:
        return Load(self.work, self.cluster.urls, clients=self.clients, each=each)

    def capacity_without(self, role: str) -> float:
        """Tokens per second of the cluster with one process of the role taken away while nothing
        ran; "" or a frontend: of all. Measured once."""
        if role == "frontend":
            role = ""
        if role not in self._can:
            gone = self.cluster.of(role)[-1] if role else None
            if gone is not None:
                gone.kill()
                time.sleep(3.0)
            began = time.monotonic()
            with self._load(max(25, self.each // 3)) as load:
                load.join()
            found = rates(load.token_times(), began + WARM_S, time.monotonic() - SPOOL_S)
            if not found:
                raise BenchError("too few requests to measure a rate: raise --requests")
            self._can[role] = median(found)
            if gone is not None:
                self.cluster.replace(gone)
                self.cluster.whole()
        return self._can[role]

    def play(self, scenario: Scenario) -> Run:
        """Raises BenchError when the cluster does not come back."""
        measured = bool(scenario.victim) and not scenario.outage
        wanted = self.capacity_without(scenario.victim) if measured else 0.0
        began = time.monotonic()
        with self._load(self.each) as load:
            run = Run(scenario, load.asks, [], began, 0.0)
            if scenario.victim:
                half = self.clients * self.each // 2
                wait_for(lambda: len(load.ended) >= half, 300.0, "half of the requests", 0.01)
                self._kill(run, load)
            load.join()
        run.ended = max(a.ended for a in load.asks)
        run.times = load.token_times()
        run.turned_away = load.turned_away
        run.wrong = self.work.wrong(load.asks)
        before = run.rate("before") or 0.0
        run.wanted = min(wanted, before) if measured else before
        if not scenario.victim:
            self._can[""] = before
        self._restore(scenario)
        self._tell_paths(run)
        try:
            self.cluster.assert_clean()
        except AssertionError as exc:
            run.left = str(exc)
        return run

    def _kill(self, run: Run, load: Load) -> None:
        role = run.scenario.victim
        victim = self.cluster.of(role)[0]
        url = self.cluster.url_of(victim) if role == "frontend" else ""
        if role == "frontend":
            self.cluster.look_at(next(u for u in self.cluster.urls() if u != url))
        freed = None
        if role == "prefill":
            alone = len(self.cluster.of(role)) == 1
            freed = Freed(self.cluster.probes("decode"), victim.instance_id, alone=alone)
            freed.ready()
        wall, run.killed = time.time(), time.monotonic()
        victim.signal(signal.SIGKILL)
        if freed is not None:
            freed.wait()
            run.noticed_s = None if freed.noticed is None else freed.noticed - run.killed
            run.freed_s = None if freed.freed is None else freed.freed - run.killed
        if run.scenario.restart:
            time.sleep(max(0.0, run.killed + RESTART_S - time.monotonic()))
            self._wait_back(run, load, self.cluster.replace(victim))
        if role == "decode":
            run.noticed_s = self._noticed_loss_of(victim, wall)
        if run.scenario.outage:
            load.join()
            back = run.killed + run.restarted_s if run.restarted_s is not None else math.inf
            run.excused = [a for a in load.asks if a.ended > run.killed and a.began < back]
        if role == "frontend":
            victim.process.wait()
            gone = time.monotonic()
            load.join()
            at_it = [a for a in load.asks if a.url == url and a.ended > run.killed]
            run.excused = [a for a in at_it if a.began <= gone]
            ends = [a.ended for a in run.excused if a.error]
            run.noticed_s = min(ends) - run.killed if ends else 0.0
            run.freed_s = self._noticed_silence(wall)

    def _wait_back(self, run: Run, load: Load, worker: Worker) -> None:
        """Note when the new worker takes work, if the load lasts so long."""
        assert run.killed is not None
        while load.running:
            try:
                self.cluster.wait_ready(worker, within_s=0.3)
            except AssertionError:
                continue
            run.restarted_s = time.monotonic() - run.killed
            return

    def _noticed_loss_of(self, victim: Worker, wall: float) -> float | None:
        """When the last frontend noticed."""
        lines = [
            logged_at(f.log, rf"decode worker {victim.instance_id} is lost", wall)
            for f in self.cluster.of("frontend")
        ]
        return max(line for line in lines if line is not None) - wall if any(lines) else None

    def _noticed_silence(self, wall: float) -> float | None:
        """When the last decode worker ended the requests of a frontend that was killed."""

        def found() -> list[float]:
            lines = [
                logged_at(d.log, r"frontend \S+ .*aborting", wall)
                for d in self.cluster.of("decode")
            ]
            return [] if None in lines else [line for line in lines if line is not None]

        try:
            noticed: list[float] = wait_for(found, 15.0, "a decode worker notices")
            return max(noticed) - wall
        except BenchError:
            return None

    def _restore(self, scenario: Scenario) -> None:
        if scenario.victim and not scenario.restart:
            dead = [w for w in self.cluster.workers if w.role == scenario.victim and not w.alive]
            self.cluster.replace(dead[-1])
        self.cluster.whole()

    def _tell_paths(self, run: Run) -> None:
        """Where the prompts were prefilled, from the frontends that still know."""
        alive = set(self.cluster.urls())
        asks = [a for a in run.asks if not a.error and a.url in alive]
        killed = run.killed if run.killed is not None else run.ended
        with httpx.Client(timeout=10.0) as http:
            told = [(a, _explained(http, a)) for a in asks]
        known = [(a, t) for a, t in told if t is not None]
        run.remote_before = _share([t["path"] for a, t in known if a.ended < killed])
        run.remote_after = _share([t["path"] for a, t in known if a.began > killed + 0.5])
        run.continued = sum(bool(t["migrated_from"]) for _, t in known)


def _explained(http: httpx.Client, ask: Ask) -> dict[str, str] | None:
    answer = http.get(f"{ask.url}/pullfill/requests/{ask.request_id}")
    return answer.json() if answer.status_code == 200 else None


def _share(paths: Sequence[str]) -> float:
    return sum(p == "remote" for p in paths) / len(paths) if paths else 0.0
