"""The planner's role switches against every static split, in simulated time: `make sim`.

Four workers get a load that is a square wave: streams, which need decode workers, then documents,
which need prefill workers. The planner (deploy/planner.py) decides every LOOK_S seconds. A worker
that changes its role first finishes its requests. It begins with the new role CHANGE_S seconds
later. A request goes to the decode worker with the fewest requests. Engines are those of
local_engine.py. Goodput is the share of good requests, as in local_or_remote.py.

    wave        no split fits both halves
    light       one prefill worker and three decode workers nearly fit both
    fast        the same load as `wave`, but each half ends before a worker could change its role
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.report import Row, row, versus
from benchmarks.sim import command
from benchmarks.sim.local_engine import (
    DecodeEngine,
    Pool,
    PrefillWorker,
    Request,
    Setup,
    Speed,
)
from benchmarks.sim.world import World
from pullfill.deploy.planner import (
    DECODE,
    PREFILL,
    Observation,
    PlanMember,
    PlanSettings,
    PlanState,
    plan,
)
from pullfill.snapshot import Demand
from pullfill.wire import RouterPolicy

WORKERS = 4
LOOK_S = 5.0
CHANGE_S = 2.0
_DRAIN_LOOK_S = 0.1
_TOKENS = 1024
"""A worker's tokens per second are those of a prompt of this length."""
SPEED = Speed(base_s=0.02, stream_s=0.001)
ITL_S = 0.1


@dataclass(frozen=True, slots=True)
class Wave:
    """A square wave: half_s seconds of streams, then as many of documents, `periods` times.

    streams, documents: requests per second.
    target: least goodput, divided by that of the best static split."""

    name: str = "wave"
    half_s: float = 300.0
    periods: int = 2
    streams: float = 3.0
    documents: float = 3.3
    target: float = 0.95

    @property
    def seconds(self) -> float:
        return 2 * self.half_s * self.periods

    def requests(self, rng: random.Random) -> list[Request]:
        found, at = list[Request](), 0.0
        while True:
            streams = at % (2 * self.half_s) < self.half_s
            at += rng.expovariate(self.streams if streams else self.documents)
            if at >= self.seconds:
                return found
            name = f"r{len(found)}"
            if streams:
                tokens, output = rng.randint(32, 96), rng.randint(300, 500)
                found.append(Request(name, at, tokens, output, 1.0, ITL_S))
            else:
                tokens, output = rng.randint(800, 3500), rng.randint(8, 48)
                found.append(Request(name, at, tokens, output, 4.0, ITL_S))


@dataclass(slots=True, eq=False)
class Site:
    """A worker. It can decode and prefill. role: empty while the worker changes its role."""

    name: str
    role: str
    engine: DecodeEngine
    prefill: PrefillWorker

    @property
    def busy(self) -> int:
        return self.engine.requests + int(self.prefill.claimed > 0)


@dataclass(frozen=True, slots=True)
class Result:
    """good: share of good requests.
    moves: time and new role of each change of role, in order."""

    good: float
    moves: Sequence[tuple[float, str]]


@dataclass(slots=True, eq=False)
class Sites:
    """All workers, and the planner. settings: of the planner. None: no worker changes its role."""

    world: World
    prefills: int
    settings: PlanSettings | None
    until: float
    moves: list[tuple[float, str]] = field(default_factory=list)
    pool: Pool = field(init=False)
    all: list[Site] = field(init=False)
    _state: PlanState = field(default_factory=PlanState)

    def __post_init__(self) -> None:
        self.pool = Pool(self.world, [])
        setup = Setup(RouterPolicy.COST)
        self.all = [
            Site(
                f"worker-{n}",
                PREFILL if n < self.prefills else DECODE,
                DecodeEngine(self.world, setup, self.pool, lambda _now: SPEED),
                PrefillWorker(self.world, f"worker-{n}", lambda _now: SPEED),
            )
            for n in range(WORKERS)
        ]
        self.pool.workers += [site.prefill for site in self.all if site.role == PREFILL]
        if self.settings is not None:
            self.world.at(LOOK_S, self._look)

    def of(self, role: str) -> list[Site]:
        return [site for site in self.all if site.role == role]

    def add(self, request: Request) -> None:
        min(self.of(DECODE), key=lambda site: site.engine.requests).engine.add(request)

    def _look(self) -> None:
        assert self.settings is not None
        now = self.world.now
        seen = Observation(
            now,
            tuple(PlanMember(site.name, site.role, site.busy) for site in self.all if site.role),
            {site.name: self._told(site.engine) for site in self.of(DECODE)},
            tuple(site.name for site in self.of("")),
        )
        found = plan(seen, self._state, self.settings)
        self._state = found.state
        for move in found.moves:
            self.moves.append((now, move.after))
            site = next(site for site in self.all if site.name == move.instance_id)
            site.role = ""
            if site.prefill in self.pool.workers:
                self.pool.workers.remove(site.prefill)
            self._drain(site, move.after)
        if now + LOOK_S < self.until:
            self.world.at(now + LOOK_S, self._look)

    def _told(self, engine: DecodeEngine) -> Demand:
        pool = len(self.pool.workers)
        rate = _TOKENS / SPEED.step(0, [(0, _TOKENS)])
        return engine.demand.figures(
            open_tokens=engine.open_tokens,
            rates=[rate] * pool,
            pool=pool,
            own_rate=rate,
            kv=0.0,
            seats=engine.seats,
        )

    def _drain(self, site: Site, to: str) -> None:
        if site.busy:
            self.world.at(self.world.now + _DRAIN_LOOK_S, lambda: self._drain(site, to))
        else:
            self.world.at(self.world.now + CHANGE_S, lambda: self._changed(site, to))

    def _changed(self, site: Site, to: str) -> None:
        site.role = to
        if to == PREFILL:
            self.pool.workers.append(site.prefill)


def run(wave: Wave, prefills: int, settings: PlanSettings | None, seed: int) -> Result:
    """Run a wave. prefills: number of prefill workers at the start."""
    world = World(seed)
    sites = Sites(world, prefills, settings, wave.seconds)
    asks = wave.requests(random.Random(seed))
    for ask in asks:
        world.at(ask.at, lambda ask=ask: sites.add(ask))  # type: ignore[misc]
    world.run()
    return Result(sum(ask.good for ask in asks) / len(asks), sites.moves)


WAVES = (
    Wave(target=1.0),
    Wave("light", documents=2.8),
    Wave("fast", half_s=10.0, periods=60),
)


def measure(seeds: int) -> list[Row]:
    """Return the rows of all waves. With the planner, a run begins with the best static split."""
    rows: list[Row] = []
    for wave in WAVES:
        static = {
            prefills: statistics.mean(run(wave, prefills, None, seed).good for seed in range(seeds))
            for prefills in range(1, WORKERS)
        }
        best = max(static, key=lambda prefills: static[prefills])
        found = [run(wave, best, PlanSettings(), seed) for seed in range(seeds)]
        good = statistics.mean(one.good for one in found)
        moves = statistics.mean(len(one.moves) for one in found) / wave.periods
        print(
            wave.name, {k: round(v, 3) for k, v in static.items()}, round(good, 3), found[0].moves
        )
        peer = f"best split, {best} prefill and {WORKERS - best} decode"
        rows += [
            versus(
                f"{wave.name}: goodput",
                100 * good,
                "%",
                peer,
                100 * static[best],
                at_least=wave.target,
            ),
            row(f"{wave.name}: workers that change sides in a period", moves, "", 4),
        ]
    return rows


if __name__ == "__main__":
    raise SystemExit(
        command.main(
            "sim-roles",
            "The planner's role switches against static splits, simulated",
            __doc__,
            measure,
        )
    )
