"""The published tables for more engines than fit here, in simulated time.

The engines are those of benchmarks/sim/local_engine.py: where a prompt is computed, is decided by
the production code. A request goes to the decode engine with the fewest requests. Plain servers
get requests in turn. Each engine has a core to itself. How long a step takes, is measured in the
same run, on one plain server (`speed_of`).

Both sides are compared as in the published tables: at the rates at which the 99th percentile of
E2E is the same. The plain servers are asked at a given rate. Their E2E is the limit, up to which
the rate of pullfill is raised.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.published.figures import Case, Figures, Pair, Shape, figures_of, rate_of
from benchmarks.published.loads import LANES, SETTLES, moments
from benchmarks.report import median
from benchmarks.serving import stats
from benchmarks.serving.contract import Answer, Ask, Kind
from benchmarks.sim.local_engine import DecodeEngine, Pool, PrefillWorker, Request, Setup, Speed
from benchmarks.sim.world import World
from pullfill.wire import RouterPolicy

POLICIES = (RouterPolicy.CONDITIONAL, RouterPolicy.COST)
RUNNING = 64
"""`--max-num-seqs` of the engines that are measured."""
PLAIN = Setup(None, step_tokens=2048, running=RUNNING)
"""vLLM's own chunk."""
SECONDS = 60.0
"""Simulated time in which requests are sent."""
STEPS, MOST = 7, 3.0
"""Halvings of the range in which the rate of pullfill is sought, and its end: so many times the
rate of the plain servers."""
GROWTH = 1.5
GPU = Speed(base_s=0.018, stream_s=0.0001, token_s=0.0001, pair_s=0.0)
"""Step times that follow from the published figures: a step takes 23 ms while answers are decoded,
and 127 ms with a prompt of 1024 tokens."""
GPU_RATES = {("1K/1K", 5): 1085 / 1024, ("1K/1K", 6): 1085 / 1024, ("1K/200", 1): 537 / 200}
"""Requests per second and plain server, from the published tokens per second."""


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


def paced(
    make: Make,
    shape: Shape,
    rate: float,
    devices: int,
    seconds: float,
    patience_s: float = math.inf,
) -> Figures | None:
    """The figures at so many requests per second.

    patience_s: return None if more than 1 % of the requests are not answered so many seconds after
    the last one was sent, or if the waiting grows all the time."""
    site, sent = make(), 0
    for at in moments(random.Random(f"{shape}/{devices}"), rate, seconds):
        site.world.at(at, lambda: site.ask(shape))
        sent += 1
    site.world.run(seconds + patience_s)
    whole = site.answers()
    if not whole or len(whole) < 0.99 * sent:
        return None
    if patience_s < math.inf and not steady(whole):
        return None
    # Not the tokens that came within `seconds`: the first answers have hardly begun.
    return replace(figures_of(whole, seconds, devices), rate=rate * shape.answer / devices)


def steady(answers: Sequence[Answer]) -> bool:
    """Whether the second half waited about as long for first tokens as the first half. Above what
    prefill engines can do, the waiting grows as long as requests come."""
    ttfts = [stats.ttft(answer) for answer in answers]
    half = len(ttfts) // 2
    return not half or median(ttfts[half:]) <= GROWTH * median(ttfts[:half])


def saturated(make: Make, shape: Shape, devices: int, seconds: float) -> float:
    """Tokens per second and device with LANES requests under way for each device."""
    site = make()

    def again() -> None:
        if site.world.now < seconds:
            site.ask(shape, again)

    for _ in range(LANES * devices):
        site.world.at(0.0, again)
    site.world.run()
    return rate_of(site.answers(), seconds, devices, SETTLES * seconds)


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


def plain(speed: Speed, devices: int) -> Make:
    """So many plain servers."""
    return lambda: Site(PLAIN, devices, 0, speed, 1)


def ours(policy: RouterPolicy, speed: Speed, decode: int) -> Make:
    """One prefill engine, and so many decode engines."""
    return lambda: Site(Setup(policy, running=RUNNING), decode, 1, speed, 1)


def compare(
    case: Case, policy: RouterPolicy, speed: Speed, rate: float, seconds: float = SECONDS
) -> Pair | None:
    """A row of the table. None: at no rate pullfill answers as soon as the limit asks.

    rate: requests per second that the plain servers are asked, all together."""
    devices, shape = case.devices, case.shape
    peer = paced(plain(speed, devices), shape, rate, devices, seconds)
    assert peer is not None, "without a limit, all requests are answered"
    limit, make = peer.times["E2E p99"], ours(policy, speed, case.decode)

    def at(rate: float) -> Figures | None:
        found = paced(make, shape, rate, devices, seconds, limit)
        return found if found and found.times["E2E p99"] <= limit else None

    best = highest(lambda rate: at(rate) is not None, MOST * rate)
    found = at(best) if best else None
    return Pair(case, found, peer, (best, rate)) if found else None


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
