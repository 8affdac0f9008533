"""The planner's role switches against every static split, in simulated time: `make sim`.

Four workers under a square wave: streams that need decode workers, then documents that need prefill
workers. The planner (deploy/scaling.py) looks every LOOK_S. A worker that changes sides finishes
what it has, and serves the other side CHANGE_S later. A request goes to the decode worker with the
fewest. Goodput is as in local_or_remote.py, whose engines are used.

    wave        no split fits both halves
    light       one prefill worker and three decode workers nearly fit both
    fast        the same as `wave`, but each half is over before a worker could change sides
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.report import Row, finish, row, versus
from benchmarks.sim.local_engine import (
    DecodeEngine,
    Pool,
    PrefillWorker,
    Request,
    Setup,
    Speed,
    World,
)
from pullfill.cluster_status import Demand
from pullfill.deploy.scaling import DECODE, PREFILL, Member, Observation, Settings, State, plan
from pullfill.wire import RouterPolicy

WORKERS = 4
LOOK_S = 5.0
CHANGE_S = 2.0
_DRAIN_LOOK_S = 0.1
_TOKENS = 1024
"""The length of prompt that tells a worker's rate."""
SPEED = Speed(base_s=0.02, stream_s=0.001)
ITL_S = 0.1


@dataclass(frozen=True, slots=True)
class Wave:
    """A square wave: half_s seconds of streams, then as many of documents, `periods` times.

    streams, documents: requests per second."""

    name: str = "wave"
    half_s: float = 300.0
    periods: int = 2
    streams: float = 3.0
    documents: float = 3.3

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
    """A worker with both sides of its process. role: empty while the worker changes sides."""

    name: str
    role: str
    engine: DecodeEngine
    prefill: PrefillWorker

    @property
    def busy(self) -> int:
        return self.engine.requests + int(self.prefill.claimed > 0)


@dataclass(frozen=True, slots=True)
class Result:
    """good: share of good requests. moves: when, and to which role."""

    good: float
    moves: Sequence[tuple[float, str]]


@dataclass(slots=True, eq=False)
class Sites:
    """All workers, and the planner. settings: None: nobody changes sides."""

    world: World
    prefills: int
    settings: Settings | None
    until: float
    moves: list[tuple[float, str]] = field(default_factory=list)
    pool: Pool = field(init=False)
    all: list[Site] = field(init=False)
    _state: State = field(default_factory=State)

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
            tuple(Member(site.name, site.role, site.busy) for site in self.all if site.role),
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


def run(wave: Wave, prefills: int, settings: Settings | None, seed: int) -> Result:
    """Run a wave. prefills: number of prefill workers at the start."""
    world = World(seed)
    sites = Sites(world, prefills, settings, wave.seconds)
    asks = wave.requests(random.Random(seed))
    for ask in asks:
        world.at(ask.at, lambda ask=ask: sites.add(ask))  # type: ignore[misc]
    world.run()
    return Result(sum(ask.good for ask in asks) / len(asks), sites.moves)


WAVES = (
    Wave(),
    Wave("light", documents=2.8),
    Wave("fast", half_s=10.0, periods=60),
)


def measure(seeds: int) -> list[Row]:
    """All rows. The planner begins with the best static split."""
    rows: list[Row] = []
    for wave in WAVES:
        static = {
            prefills: statistics.mean(run(wave, prefills, None, seed).good for seed in range(seeds))
            for prefills in range(1, WORKERS)
        }
        best = max(static, key=lambda prefills: static[prefills])
        found = [run(wave, best, Settings(), seed) for seed in range(seeds)]
        good = statistics.mean(one.good for one in found)
        moves = statistics.mean(len(one.moves) for one in found) / wave.periods
        print(
            wave.name, {k: round(v, 3) for k, v in static.items()}, round(good, 3), found[0].moves
        )
        peer = f"best split, {best} prefill and {WORKERS - best} decode"
        least = {"wave": 1.0, "light": 0.95, "fast": 0.95}[wave.name]
        rows += [
            versus(
                f"{wave.name}: goodput", 100 * good, "%", peer, 100 * static[best], at_least=least
            ),
            row(f"{wave.name}: workers that change sides in a period", moves, "", 4),
        ]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each wave")
    parser.add_argument("--save", action="store_true", help="write results/sim-roles.*")
    told = parser.parse_args()
    return finish(
        "sim-roles", measure(told.seeds), quiet=True, save=told.save,
        title="The planner's role switches against static splits, simulated",
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
