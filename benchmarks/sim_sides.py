"""Simulates workers with one side, workers with both sides, and plain vLLM servers.

sim.py, sim_splits.py and sim_fleet.py use it.

A job is an ordinary request of the engine that computes it. `Engine` schedules as vLLM does:
running requests first, in order, one token for each that generates and a chunk for each prompt,
then waiting ones while the step has tokens and the engine has seats. What differs between systems
is which worker gets a request (`Options.place`), which one computes its prompt (`Rule.remote`), and
how a step is filled (`Rule`). Production code decides the first: `Placer`. Under `conditional` and
`cost` it decides the others, too: rules.py and `CostModel`. Only the times are made up: `Machine`,
WAY_S, MOVES_S.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.report import percentile
from pullfill.decode_worker.cost import CostModel, Prefill, Queue, Targets
from pullfill.decode_worker.rules import OF_THE_CLUSTER, Decision, Situation, first
from pullfill.engine.front_wire import LoadReport
from pullfill.frontend.dispatch import WORTH_MOVING
from pullfill.frontend.routing import choice
from pullfill.prefill_worker.puller import Puller, budget_of
from pullfill.prefill_worker.scheduler import Meter
from pullfill.wire import DecodePolicy, RouterConfig, RouterPolicy
from pullfill.worker.step_cost import StepCost
from pullfill.worker.step_meter import Step
from pullfill.worker.step_rule import Prompt

BLOCK = 16
WAY_S = 0.003
"""Seconds from the decision until an idle prefill side claims the job. It takes as long again from
the last KV write to the commit."""
MOVES_S = 0.05
"""Seconds between two tokens of a stream that moves. The other worker reads its KV meanwhile."""
TELL_S = 0.1
"""How old a worker's load is where others read it, at most."""
QUIET_S = 0.5
"""A worker with both sides pulls jobs if none of its own prompts waits and none has come for so
many seconds, or if a full step fits between two tokens. Beside streams it pulls one at a time."""


class World:
    """Simulated time in seconds, from 0. It is a `pullfill.clock.Clock`.

    Events of the same time run in the order in which they were added. So one seed gives one result.
    """

    def __init__(self, seed: int = 0) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()

    def monotonic(self) -> float:
        return self.now

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Add an event: call `what` at the time `when`."""
        heapq.heappush(self._events, (when, next(self._serial), what))

    def run(self, until: float = math.inf) -> None:
        """Run all events whose time is before `until`, also those that are added meanwhile."""
        while self._events and self._events[0][0] < until:
            self.now, _, what = heapq.heappop(self._events)
            what()


@dataclass(frozen=True, slots=True)
class Machine:
    """The true time of a step. The defaults are those of a CPU core of the trace's runs: 425 tokens
    take 45 ms after no others, 70 after 1000, 95 after 2000 and 145 after 4000.

    jitter, work_jitter: standard deviations of the logarithms of a step's time, and of what its
    prompts add. work_tail: in which share of steps the second is that large. Else it is a quarter.
    pause_share, pause_s, pause_tail: how many steps the machine interrupts, for how long at least,
    and the exponent of the Pareto distribution of that time."""

    base_s: float = 0.0062
    stream_s: float = 0.00028
    kv_s: float = 1.0e-7
    token_s: float = 7.7e-5
    pair_s: float = 5.85e-8
    jitter: float = 0.04
    work_jitter: float = 0.4
    work_tail: float = 0.25
    pause_share: float = 0.02
    pause_s: float = 0.006
    pause_tail: float = 3.5

    def cost(self) -> StepCost:
        """What `step` is around."""
        return StepCost(self.base_s, self.stream_s, self.kv_s, self.token_s, self.pair_s)

    def times(self, by: float, base: float) -> Machine:
        """The same machine with other speeds: how many times as long prompts and the rest take."""
        return replace(
            self,
            base_s=self.base_s * base,
            stream_s=self.stream_s * base,
            kv_s=self.kv_s * base,
            token_s=self.token_s * by,
            pair_s=self.pair_s * by,
        )

    def step(
        self, rng: random.Random, streams: int, kv: int, parts: Sequence[tuple[int, int]]
    ) -> float:
        """parts: (tokens before, tokens) of each prompt."""
        cost = self.cost()
        seconds = cost.base(streams, kv)
        if parts:
            spread = self.work_jitter * (1.0 if rng.random() < self.work_tail else 0.25)
            work = sum(cost.work(*part) for part in parts)
            seconds += work * math.exp(rng.gauss(0.0, spread))
        seconds *= math.exp(rng.gauss(0.0, self.jitter))
        if rng.random() < self.pause_share:
            seconds += self.pause_s * rng.paretovariate(self.pause_tail)
        return seconds


@dataclass(slots=True, eq=False)
class Request:
    """One request, or the job of one. See `Engine`.

    blocks: equal numbers are equal blocks of BLOCK tokens.
    job_of: what this is the job of."""

    name: str
    at: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()
    ttft_s: float = 1.0
    itl_s: float = 0.05
    hit: int = 0
    computed: int = 0
    made: int = 0
    first: float = math.inf
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    home: Engine | None = None
    share: Any = None
    job_of: Request | None = None
    remote: bool | None = None
    moved: bool = False

    @property
    def due(self) -> float:
        return self.at + self.ttft_s

    @property
    def left(self) -> int:
        return self.prompt - self.computed

    @property
    def good(self) -> bool:
        if self.first - self.at > self.ttft_s:
            return False
        return not self.gaps or percentile(self.gaps, 0.99) <= self.itl_s

    def token(self, now: float) -> None:
        if self.made:
            self.gaps.append(now - self.last)
        else:
            self.first = now
        self.made += 1
        self.last = now


@dataclass(frozen=True, slots=True)
class Options:
    """How one system is run.

    rule: `plain` (vLLM), `conditional` or `cost`.
    place: `router.decode_policy`.
    threshold: `router.max_local_prefill_length`.
    chunk: `--long-prefill-token-threshold`, without `cost`. 0: vLLM's default.
    seats: `--max-num-seqs`."""

    rule: str
    place: DecodePolicy = DecodePolicy.ROUND_ROBIN
    threshold: int = 512
    chunk: int = 0
    step_tokens: int = 1024
    seats: int = 64


class Rule:
    """What vLLM's own scheduler does: nothing is sorted, and chunks are as its flags say."""

    deferred: Collection[str] = ()

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.model = CostModel(engine.options.step_tokens, clock=engine.world)

    def plan(self) -> tuple[int, int]:
        """Return vLLM's threshold (0: none) and the most tokens of the step."""
        return self.engine.options.chunk, self.engine.options.step_tokens

    def scheduled(self, parts: list[tuple[Request, int]]) -> None: ...
    def stepped(self, seconds: float) -> None: ...
    def finished(self, request: Request) -> None: ...
    def loaded(self, request: Request) -> None: ...

    def remote(self, request: Request) -> bool:
        return False


class Product(Rule):
    """The rules `conditional` and `cost`, by the production code."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        policy = RouterPolicy(engine.options.rule)
        self.config = RouterConfig(policy=policy, max_local_prefill_length=engine.options.threshold)
        self.plans = policy is RouterPolicy.COST or engine.sides == "prefill"
        self.step: Any = None
        self.decided: dict[str, Prefill] = {}

    def plan(self) -> tuple[int, int]:
        """As step_meter.py does it."""
        if not self.plans:
            return super().plan()
        engine, most = self.engine, self.engine.options.step_tokens
        if not engine.undone:  # most steps
            self.model.plan((), (), most)
            return 0, min(most, len(engine.running) + 1)
        own: list[Prompt] = []
        jobs: list[Prompt] = []
        streams = 0
        for r in [*engine.running, *engine.waiting]:
            if r.left <= 1 and r.job_of is None:
                streams += 1  # or its KV has come
            elif r.left > 0:
                known = own if r.job_of is None else jobs
                known.append(Prompt(r.name, r.computed, r.left, r.due, r.at))
        plan = self.model.plan(own, jobs, max(1, most - streams))
        place = {name: n for n, name in enumerate(plan.order)}
        self.deferred = place.keys() - plan.tokens.keys()
        asks = any(r.name in self.deferred and r.remote is None for r in engine.waiting)
        # First come those whose KV has come, which have no place.
        engine.running.sort(key=lambda r: place.get(r.name, -1))
        engine.waiting = deque(sorted(engine.waiting, key=lambda r: place.get(r.name, -1)))
        return max(plan.tokens.values(), default=0), min(most, streams + plan.total + asks)

    def scheduled(self, parts: list[tuple[Request, int]]) -> None:
        self.model.kv_tokens = kv = sum(r.computed for r, _ in parts if r.made)
        prompts = tuple((r.computed, n) for r, n in parts if not r.made)
        self.step = Step(len(parts) - len(prompts), kv, prompts, {r.name: n for r, n in parts})

    def stepped(self, seconds: float) -> None:
        self.model.stepped(self.step, seconds)

    def finished(self, request: Request) -> None:
        self.model.finished(request.name)
        if (one := self.decided.pop(request.name, None)) and one.option and one.took_s:
            error = abs(one.option.ttft_s / one.took_s - 1.0)
            self.engine.cluster.errors.append((one.decided + one.took_s, error))

    def loaded(self, request: Request) -> None:
        self.model.settled(request.name, True)

    def moved(self, request: Request) -> None:
        """It goes on here. To the model it is a prompt of which one token is left."""
        targets = Targets(request.ttft_s, request.itl_s)
        one = self.model.predict(Queue(0), targets, request.computed, 1)
        self.model.admitted(request.name, one, False)

    def remote(self, request: Request) -> bool:
        engine, world = self.engine, self.engine.world
        queue = engine.cluster.ahead(engine)
        costs = self.model.predict(
            queue, Targets(request.ttft_s, request.itl_s),
            request.hit, request.prompt - request.hit, world.now - request.at,
        )  # fmt: skip
        now = Situation(
            request.prompt,
            request.hit,
            config=self.config,
            prefill_workers=queue.workers,
            queue_available=True,
            costs=costs,
        )
        remote = (first(OF_THE_CLUSTER, request, now) or Decision(True, "long_prompt")).remote
        self.model.admitted(request.name, costs, remote)
        self.decided[request.name] = costs
        return remote

    def wants(self) -> int | None:
        """Return how many more prompt tokens the worker takes now. None: it pulls no jobs.

        Its rules are those of `Neighbour` and `PrefillRole` (prefill_worker/side.py)."""
        engine, now = self.engine, self.engine.world.now
        step_s = engine.machine.cost().work(0, engine.options.step_tokens)
        own, free = any(r.job_of is None for r in engine.undone.values()), engine.cluster.free
        if engine.sides == "both" and step_s > self.config.itl_ms / 1e3:  # it delays streams
            if self.plans and (own or engine.number not in free):
                return 0 if own or free else 1 - engine.job_tokens()  # as `Outlook.wanted` tells it
            if not self.plans and (own or engine.number not in free or now - engine.came < QUIET_S):
                return None
        if engine.sides == "decode":
            return None
        if engine.jobs >= Puller.max_jobs:
            return 0
        most = budget_of(engine.options.step_tokens)
        return most - sum(r.left for r in engine.undone.values() if r.due > now)


class Engine:
    """One worker: its engine, its prefix cache, and its sides (`decode`, `prefill` or `both`).

    own: requests of its clients that have not ended. jobs: number of pulled jobs."""

    def __init__(self, cluster: Cluster, number: int, machine: Machine, sides: str) -> None:
        self.cluster, self.world, self.options = cluster, cluster.world, cluster.options
        self.number, self.machine, self.sides = number, machine, sides
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.arrived: deque[Request] = deque()
        # All whose prompts are not computed, so nobody has to look for them among all streams.
        self.undone: dict[str, Request] = {}
        self.cache: set[int] = set()
        self.own: set[Request] = set()
        self.jobs = 0
        self.came = -math.inf
        self._meter = Meter()
        self._stepping = False
        self._told_at = self._paced_at = -math.inf
        self.rule: Any = Rule(self) if self.options.rule == "plain" else Product(self)

    # ------------------------------------------------------------------ load

    def hit(self, request: Request) -> int:
        count = 0
        for block in request.blocks:
            if block not in self.cache:
                break
            count += 1
        return min(count * BLOCK, (request.prompt - 1) // BLOCK * BLOCK)

    def backlog(self) -> int:
        """Prompt tokens, own and pulled, that are not computed."""
        return sum(r.left for r in self.undone.values())

    def job_tokens(self) -> int:
        return sum(r.left for r in self.undone.values() if r.job_of is not None)

    def load(self) -> LoadReport:
        """What the worker has told others, at most TELL_S ago."""
        now = self.world.now
        if now - self._told_at >= TELL_S:
            streams, model = [r for r in self.running if r.made], self.rule.model
            cost = model.cost
            self._told = LoadReport(
                running=len(self.own), waiting=0, uncached_tokens_queued=self.backlog(),
                active_blocks=sum(r.prompt + r.made for r in self.own) // BLOCK,
                free_blocks=1 << 24,  # more than it needs
                seats=self.options.seats, requests=len(self.own),
                streams=len(streams),
                stream_tokens=sum(r.computed for r in streams),
                prompt_share=min(1.0, model.prompts.share()),
                step_s=(cost.base_s, cost.stream_s, cost.kv_s), ended=model.ended,
                prompt_token_s=model.prompt_token_s,
                prompt_tokens_per_s=model.first_tokens.share(),
            )  # fmt: skip
            self._told_at = now - now % TELL_S
        return self._told

    def pace(self) -> tuple[float, float]:
        """What a job would meet, as told at most TELL_S ago."""
        if self.world.now - self._paced_at >= TELL_S:
            self._paced_at = self.world.now
            self._pace: tuple[float, float] = self.rule.model.pace(1.0)
        return self._pace

    # ------------------------------------------------------------------ requests and jobs

    def add(self, request: Request) -> None:
        """A client's request."""
        self.own.add(request)
        self.came = self.world.now
        self.world.at(self.came + QUIET_S + 1e-6, self._quiet)
        request.home = self
        request.hit = request.computed = self.hit(request)
        self._wait(request)
        self.wake()

    def _goes(self, request: Request) -> bool:
        """Decide where the prompt of a request is computed."""
        request.remote = self.cluster.pulls and self.rule.remote(request)
        if request.remote:
            del self.undone[request.name]
            self.cluster.changed(self)
            self.cluster.put(request)
        return request.remote

    def take(self, request: Request) -> None:
        """Pull the job of a request. It begins with `wake`."""
        if request.home is self:
            request.remote = False
            self._wait(request)
        else:
            self.jobs += 1
            job = Request(
                f"j{request.name}", request.at, request.prompt - 1, 0, request.blocks,
                request.ttft_s, request.itl_s, request.hit, request.hit, job_of=request,
            )  # fmt: skip
            self._wait(job)

    def _wait(self, request: Request) -> None:
        self.waiting.append(request)
        self.undone[request.name] = request
        self.cluster.changed(self)

    def bring(self, request: Request) -> None:
        """The KV of a request has come."""
        request.computed = request.hit = request.prompt - 1
        self.cache.update(request.blocks[: request.prompt // BLOCK])
        self.rule.loaded(request)
        self.arrived.append(request)
        self.wake()

    def go_on(self, request: Request) -> None:
        """Continue a stream that another worker began, as soon as there is a seat."""
        if len(self.running) >= self.options.seats:
            self.world.at(self.world.now + MOVES_S, lambda: self.go_on(request))
            return
        request.home = self
        self.running.append(request)
        self.rule.moved(request)
        self.cluster.changed(self)
        self.wake()

    def wake(self) -> None:
        if not self._stepping:
            self._stepping = True
            self._step()

    def _quiet(self) -> None:
        self.cluster.changed(self)
        self.cluster.pull(self)

    # ------------------------------------------------------------------ one step

    def _step(self) -> None:
        self.cluster.pull(self)
        while self.arrived:
            request = self.arrived.popleft()
            self.waiting.appendleft(request)
            self.undone[request.name] = request
            self.cluster.changed(self)
        parts, before = list[tuple[Request, int]](), -1
        while not parts and before != (before := len(self.undone)):  # all went to the queue
            parts = self._schedule(*self.rule.plan())
        if not parts:
            self._stepping = False
            return
        self.rule.scheduled(parts)
        prompts = [(r.computed, n) for r, n in parts if not r.made]
        streams = [r for r, _ in parts if r.made]
        kv = sum(r.computed for r in streams)
        seconds = self.machine.step(self.world.random, len(streams), kv, prompts)
        self.world.at(self.world.now + seconds, lambda: self._done(parts, seconds, bool(prompts)))
        if tokens := sum(n for r, n in parts if r.job_of is not None):
            self._meter.step(tokens, self.world.now, self.world.now + seconds)
            self.cluster.rates[self.number] = self._meter.load((), (), 0.0).tokens_per_s

    def _schedule(self, threshold: int, budget: int) -> list[tuple[Request, int]]:
        found: list[tuple[Request, int]] = []
        cap = threshold if len(self.running) + len(self.waiting) > 1 else 0
        for r in self.running:
            if budget <= 0:
                break
            count = 1 if r.made else min(r.left, cap or r.left, budget)
            found.append((r, count))
            budget -= count
        deferred: list[Request] = []
        while budget > 0 and self.waiting and len(self.running) < self.options.seats:
            r = self.waiting.popleft()
            if r.job_of is None and not r.remote:
                r.hit = r.computed = max(r.computed, self.hit(r))
                if r.remote is None and self._goes(r):
                    continue
            if r.name in self.rule.deferred:
                deferred.append(r)
                continue
            count = min(r.left, cap or r.left, budget)
            self.running.append(r)
            found.append((r, count))
            budget -= count
        self.waiting.extendleft(reversed(deferred))
        return found

    def _done(self, parts: list[tuple[Request, int]], seconds: float, prompts: bool) -> None:
        now = self.world.now
        self.rule.stepped(seconds)
        over: list[Request] = []
        for r, count in parts:
            if r.job_of is None and r.home is not self:  # it has moved
                continue
            r.computed += count
            if r.computed < r.prompt:
                continue
            if not r.made:
                del self.undone[r.name]
            if r.job_of is not None:
                over.append(r)
                continue
            if not r.made:
                self.cache.update(r.blocks[: r.prompt // BLOCK])
            r.token(now)
            r.share.first()
            if r.made >= r.output:
                over.append(r)
        for r in over:
            self.running.remove(r)
            if r.job_of is not None:
                self.jobs -= 1
                self.cluster.commit(r.job_of)
            else:
                self.own.remove(r)
                r.share.end(r.made)
                self.rule.finished(r)
                self.cluster.over(r)
        if prompts or over:
            self.cluster.changed(self)
        self._step()


class Cluster:
    """Workers behind a frontend, the queue between them, and what they know of each other.

    sides: of each worker. over: called with each request that has ended.
    errors: time and error of each prediction."""

    def __init__(
        self, world: World, options: Options, sides: Sequence[str], machine: Machine
    ) -> None:
        self.world, self.options = world, options
        self.queue: deque[Request] = deque()
        # Jobs, and their tokens, there and at the workers that pull.
        self._jobs = self._tokens = 0
        # Of each worker that has computed jobs: prompt tokens in a second.
        self.rates: dict[int, float] = {}
        self.errors: list[tuple[float, float]] = []
        self.engines: list[Engine] = []
        self.engines += [Engine(self, n, machine, side) for n, side in enumerate(sides)]
        self.decode = [one for one in self.engines if one.sides != "prefill"]
        self.pulls = options.rule != "plain" and any(o.sides != "decode" for o in self.engines)
        self.over: Callable[[Request], None] = lambda request: None
        # Of each worker that pulls, the jobs that it has and their tokens. Then of each one that
        # wants more, by what it is chosen: streams, backlog, number.
        self._pullers: dict[int, tuple[int, int]] = {}
        # Of those with streams: tokens_per_s and harm of a job there (`Load`).
        self._paces: dict[int, tuple[float, float]] = {}
        self._able: dict[int, tuple[bool, int, int]] = {}
        self.free: set[int] = set()  # those that pull and have no streams
        for one in self.engines:
            self.changed(one)
        self._by_name = {f"{one.number:06}": one for one in self.decode}
        self.placer, self._told_until = choice.Placer(world.random), 0.0
        self._even_at = 0.0 if options.place is DecodePolicy.PACK else math.inf

    # ------------------------------------------------------------------ placement

    def _tell(self) -> None:
        """Give the frontend the load of each worker. It is told of no limit to their KV memory."""
        if (now := self.world.now) >= self._told_until:
            self._told_until = now - now % TELL_S + TELL_S
            for name, engine in self._by_name.items():
                told = engine.load()
                tokens, blocks = told.uncached_tokens_queued, told.active_blocks
                view = self.placer.report(name, tokens, blocks, None)
                view.told, view.told_at = told, now

    def _even(self) -> None:
        """Do what a frontend does: if streams are unevenly spread, move one of them."""
        self._tell()
        self._even_at = (now := self.world.now) + choice.MOVE_S
        if found := self.placer.uneven(self._by_name, now):
            source, to = (self._by_name[name] for name in found)
            able = [r for r in source.running if r.made and not r.moved]
            one = max(able, key=lambda r: r.output - r.made, default=None)
            if one is not None and one.output - one.made >= WORTH_MOVING:
                source.running.remove(one)
                source.rule.finished(one)
                one.home, one.moved = None, True
                source.own.remove(one)
                to.own.add(one)
                one.share.end(one.made)
                view, prompt = self.placer.join(found[1]), choice.Prompt(one.computed, BLOCK)
                one.share = self.placer.send(view, one.computed, prompt, now)
                self.changed(source)
                self.world.at(now + MOVES_S, lambda: to.go_on(one))

    def expect(self, requests: Sequence[Request]) -> None:
        """Add each of these requests when it comes, and name them."""
        for number, one in enumerate(requests):
            one.name = f"r{number}"
            self.world.at(one.at, lambda one=one: self.add(one))  # type: ignore[misc]

    def ask_again(self, clients: int, prompt: int, output: int, within_s: float) -> list[Request]:
        """Add clients that ask again at once. Returns their requests, also those to come.

        within_s: seconds in which the first ones come."""
        asks: list[Request] = []

        def ask() -> None:
            asks.append(Request(f"r{len(asks)}", self.world.now, prompt, output))
            self.add(asks[-1])

        self.over = lambda request: self.world.at(self.world.now, ask)
        for number in range(clients):
            self.world.at(within_s * number / clients, ask)
        return asks

    def add(self, request: Request) -> None:
        """Choose who answers a request, as the frontend does, and add it there."""
        self._tell()
        now, prompt = self.world.now, choice.Prompt(request.prompt, BLOCK, request.blocks)
        able = self._by_name.items() if request.blocks else ()
        held = {name: engine.hit(request) // BLOCK for name, engine in able}
        view, told = self.placer.choose(self.options.place, prompt, self._by_name, now, held)
        request.share = self.placer.send(view, told.matched_tokens, prompt, now)
        self._by_name[view.instance_id].add(request)

    # ------------------------------------------------------------------ the queue

    def changed(self, one: Engine) -> None:
        """Something has changed by which a worker decides whether, and how much, it pulls.

        All are known by that, as there may be 1,000."""
        if one.sides == "decode" or not self.pulls:
            return
        streams = any(r.made for r in one.running)
        (self.free.discard if streams else self.free.add)(one.number)
        jobs, tokens = self._pullers.pop(one.number, (0, 0))
        self._able.pop(one.number, None)
        self._paces.pop(one.number, None)
        if (wants := one.rule.wants()) is not None:
            self._pullers[one.number] = one.jobs, one.job_tokens()
            jobs, tokens = jobs - one.jobs, tokens - one.job_tokens()
            if one.sides == "both" and (pace := one.pace())[1]:
                self._paces[one.number] = pace
            if wants > 0:
                self._able[one.number] = streams, one.backlog(), one.number
        self._jobs, self._tokens = self._jobs - jobs, self._tokens - tokens

    def ahead(self, home: Engine) -> Queue:
        """What the job of a prompt would meet."""
        workers = len(self._pullers) - (home.number in self._pullers)
        jobs, tokens = self._pullers.get(home.number, (0, 0))
        rate, harm = sum(self.rates.values()) / max(1, len(self.rates)), 0.0
        if workers > (paced := len(self._paces.keys() - {home.number})):
            workers -= paced  # those without streams
        elif paced:
            told = [pace for number, pace in self._paces.items() if number != home.number]
            rate, harm = sum(pace[0] for pace in told) / paced, min(pace[1] for pace in told)
        return Queue(workers, self._jobs - jobs, self._tokens - tokens, rate, harm)

    def put(self, request: Request) -> None:
        self.queue.append(request)
        self._jobs, self._tokens = self._jobs + 1, self._tokens + request.left
        self.world.at(self.world.now + WAY_S, self.offer)

    def offer(self) -> None:
        """Give each job of the queue to a worker that wants one. Those without streams come first.

        Its own decode worker takes it only if it is late, or if no other pulls any more."""
        takers: list[Engine] = []
        while self.queue:
            home = (request := self.queue[0]).home
            assert home is not None
            able = [one for one in self._able.values() if one[2] != home.number]
            if not able and self.world.now - request.at > request.ttft_s:
                able = [*self._able.values()]
            if able:
                taker = self.engines[min(able)[2]]
            elif self._pullers.keys() - {home.number}:
                break
            else:
                home.rule.model.settled(request.name, False)
                taker = home
            self.queue.popleft()
            self._jobs, self._tokens = self._jobs - 1, self._tokens - request.left
            taker.take(request)
            takers.append(taker)
        for taker in reversed(takers):
            taker.wake()

    def pull(self, engine: Engine) -> None:
        """Called before each step of a worker."""
        if self.world.now >= self._even_at:
            self._even()
        if self.queue:
            self.changed(engine)  # jobs that it has may be late by now
            if engine.number in self._able or not self._pullers:
                self.offer()

    def commit(self, request: Request) -> None:
        home = request.home
        assert home is not None
        self.world.at(self.world.now + WAY_S, lambda: home.bring(request))
