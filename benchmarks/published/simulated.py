"""The published tables for more engines than fit here, in simulated time.

The engines are those of benchmarks/sim/local_engine.py: where a prompt is computed, is decided by
the production code. A request goes to the decode engine with the fewest requests. Plain servers
get requests in turn. Each engine has a core to itself. How long a step takes, is measured in the
same run, on one plain server (`speed_of`).

Both sides are compared as in the published tables: at the rates at which the 99th percentile of
E2E is the same. The limit is that of the plain servers at a share of their saturated rate.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.published.figures import Case, Figures, Pair, Shape, figures_of, rate_of
from benchmarks.published.loads import LANES, moments
from benchmarks.serving.contract import Answer, Ask, Kind
from benchmarks.sim.local_engine import DecodeEngine, Pool, PrefillWorker, Request, Setup, Speed
from benchmarks.sim.world import World
from pullfill.wire import RouterPolicy

POLICIES = (RouterPolicy.CONDITIONAL, RouterPolicy.COST)
PLAIN = Setup(None, step_tokens=2048)
"""vLLM's own chunk."""
SECONDS, FULL_SECONDS = 300.0, 120.0
STEPS = 8
"""Halvings of the range in which the rate is sought."""


@dataclass(slots=True)
class Timed(Request):
    """A request that keeps the time of each token. over: called with its last token."""

    times: list[float] = field(default_factory=list)
    over: Callable[[], None] | None = None

    def token(self, now: float) -> None:
        Request.token(self, now)
        self.times.append(now)
        if self.over is not None and self.made >= self.output:
            self.over()


class Site:
    """Engines in a simulated world. Used once.

    setup: of the decode engines. prefill: the number of prefill engines. 0: plain servers."""

    def __init__(self, setup: Setup, decode: int, prefill: int, speed: Speed, seed: int) -> None:
        self.world = World(seed)
        workers = [PrefillWorker(self.world, f"p{n}", lambda _now: speed) for n in range(prefill)]
        pool = Pool(self.world, workers)
        self._in_turn = not prefill
        self._engines = [
            DecodeEngine(self.world, setup, pool, lambda _now: speed) for _ in range(decode)
        ]
        self._asked: list[Timed] = []

    def ask(self, shape: Shape, over: Callable[[], None] | None = None) -> None:
        """Send a request now."""
        number, at = len(self._asked), self.world.now
        request = Timed(f"r{number}", at, shape.prompt, shape.answer, 1.0, 0.05, over=over)
        self._asked.append(request)
        if self._in_turn:
            self._engines[number % len(self._engines)].add(request)
        else:
            min(self._engines, key=lambda engine: engine.requests).add(request)

    def answers(self) -> list[Answer]:
        """Those that are whole."""
        return [
            Answer(Ask(Kind.SHORT, (), r.output, r.name, r.at), r.at, r.at, r.times)
            for r in self._asked
            if r.made >= r.output
        ]


Make = Callable[[], Site]


def paced(make: Make, shape: Shape, rate: float, devices: int, seconds: float = SECONDS) -> Figures:
    """The figures at so many requests per second."""
    site = make()
    for at in moments(random.Random(f"{shape}/{devices}"), rate, seconds):
        site.world.at(at, lambda: site.ask(shape))
    site.world.run()
    return figures_of(site.answers(), seconds, devices)


def saturated(make: Make, shape: Shape, devices: int, seconds: float = FULL_SECONDS) -> float:
    """Tokens per second and device with LANES requests under way for each device."""
    site = make()

    def again() -> None:
        if site.world.now < seconds:
            site.ask(shape, again)

    for _ in range(LANES * devices):
        site.world.at(0.0, again)
    site.world.run()
    return rate_of(site.answers(), seconds, devices)


def highest(fits: Callable[[float], bool], most: float) -> float:
    """The highest rate up to `most` that fits, if all lower ones do. 0: none was found."""
    low, high = 0.0, most
    for _ in range(STEPS):
        middle = (low + high) / 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def compare(
    case: Case, policy: RouterPolicy, speed: Speed, share: float, seconds: float = SECONDS
) -> Pair | None:
    """A row of the table. None: at no rate pullfill answers as soon as the limit asks.

    share: of the saturated rate of the plain servers, at which their E2E is the limit."""
    devices, shape = case.devices, case.shape

    def plain() -> Site:
        return Site(PLAIN, devices, 0, speed, 1)

    def ours() -> Site:
        return Site(Setup(policy), case.decode, 1, speed, 1)

    full = saturated(plain, shape, devices) * devices / shape.answer
    peer = paced(plain, shape, share * full, devices, seconds)
    limit = peer.times["E2E p99"]

    def fits(rate: float) -> bool:
        return paced(ours, shape, rate, devices, seconds).times["E2E p99"] <= limit

    rate = highest(fits, 2.0 * full)
    if not rate:
        return None
    return Pair(case, paced(ours, shape, rate, devices, seconds), peer, (rate, share * full))


def speed_of(ttft_s: Mapping[int, float], step_s: Mapping[int, float]) -> Speed:
    """The speed of an engine. Raises ValueError for fewer than two of each.

    ttft_s: time to first token of one prompt on an idle server, in seconds, by its length.
    step_s: time between two tokens, in seconds, by the number of streams.
    """
    if len(ttft_s) < 2 or len(step_s) < 2:
        raise ValueError("two lengths and two numbers of streams are needed")
    few, many = min(step_s), max(step_s)
    stream_s = max(0.0, (step_s[many] - step_s[few]) / (many - few))
    base_s = max(0.0, step_s[few] - few * stream_s)
    # Least squares: ttft - base = token_s * n + pair_s * n^2 / 2, each point by its relative error.
    a = b = c = u = v = 0.0
    for n, ttft in ttft_s.items():
        weight, x, y = (n / ttft) ** 2, 1.0, n / 2
        z = (ttft - base_s) / n
        a, b, c = a + weight * x * x, b + weight * x * y, c + weight * y * y
        u, v = u + weight * x * z, v + weight * y * z
    pair_s = max(0.0, (a * v - b * u) / (a * c - b * b))
    token_s = max(0.0, (u - b * pair_s) / a)
    return Speed(base_s, stream_s, token_s, pair_s)
