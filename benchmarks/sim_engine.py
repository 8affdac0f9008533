"""A decode worker's engine and prefill workers in simulated time, under the production router.

`DecodeEngine` schedules as vLLM does: running requests first, in order, then waiting ones while the
step has tokens left. The production code decides where a prompt is computed
(`rules.py`, `CostModel`) and sizes the chunks (`PrefillChunks`). Only the times are made up:
`Speed` and WAY_S.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from pullfill.decode_worker.cost import CostModel, Queue, Targets
from pullfill.decode_worker.rules import OF_THE_CLUSTER, Decision, Situation, first
from pullfill.engine.view import PrefillChunks
from pullfill.wire import RouterConfig, RouterPolicy
from pullfill.worker.step_rule import Prompt

MAX_RUNNING = 32
PULL_TOKENS = 4096
"""Tokens that a prefill worker claims ahead, as `prefill_worker.puller.budget_of` says."""
WAY_S = 0.003
"""From the decision to a claim by an idle prefill worker, and from its last write to the commit."""


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
        """Run the events before the time `until`, and those that they add."""
        while self._events and self._events[0][0] < until:
            self.now, _, what = heapq.heappop(self._events)
            what()

    def noisy(self, seconds: float, jitter: float) -> float:
        """Return a random duration around `seconds`. jitter: its relative standard deviation."""
        return seconds * math.exp(self.random.gauss(0.0, jitter)) if jitter else seconds


@dataclass(frozen=True, slots=True)
class Speed:
    """How long a step takes. The defaults are those of `make bench-paths` on a CPU core: 256 tokens
    in 76 ms, 4096 in 2.8 s, four streams in 7.5 ms. jitter: of each step, as a share."""

    base_s: float = 0.0065
    stream_s: float = 0.00025
    token_s: float = 0.00028
    pair_s: float = 9.1e-8
    byte_s: float = 1e-9
    jitter: float = 0.05

    def step(self, streams: int, parts: Sequence[tuple[int, int]]) -> float:
        """parts: (tokens before, tokens) of each prompt."""
        work = sum(n * (self.token_s + self.pair_s * (at + n / 2)) for at, n in parts)
        return self.base_s + self.stream_s * streams + work


@dataclass(slots=True)
class Request:
    """One request and what became of it, in seconds of the simulation."""

    name: str
    at: float
    prompt: int
    output: int
    ttft_s: float
    itl_s: float
    hit: int = 0
    computed: int = 0
    made: int = 0
    first: float = math.inf
    last: float = 0.0
    worst_gap: float = 0.0

    @property
    def good(self) -> bool:
        """Both targets are kept. The 99th percentile of so few gaps is the longest."""
        return self.first - self.at <= self.ttft_s and self.worst_gap <= self.itl_s

    def token(self, now: float) -> None:
        if self.made:
            if now - self.last > self.worst_gap:
                self.worst_gap = now - self.last
        else:
            self.first = now
        self.made += 1
        self.last = now


@dataclass(slots=True)
class PrefillWorker:
    """Computes jobs one after another. speed_at: its speed, which may change with time."""

    world: World
    name: str
    speed_at: Callable[[float], Speed]
    free_at: float = 0.0
    claimed: int = 0


class Pool:
    """The queue, and the prefill workers that pull from it."""

    def __init__(self, world: World, workers: list[PrefillWorker]) -> None:
        self._world = world
        self.workers = workers
        self._queue: deque[tuple[Request, Callable[[], None]]] = deque()
        self.jobs = self.tokens = 0

    def put(self, request: Request, done: Callable[[], None]) -> None:
        self.jobs += 1
        self.tokens += request.prompt - request.hit
        self._queue.append((request, done))
        self._world.at(self._world.now + WAY_S, self._pull)

    def _pull(self) -> None:
        while self._queue:
            able = [w for w in self.workers if w.claimed < PULL_TOKENS]
            if not able:
                return
            worker = min(able, key=lambda w: w.free_at)
            self._start(worker, *self._queue.popleft())

    def _start(self, worker: PrefillWorker, request: Request, done: Callable[[], None]) -> None:
        world, tokens = self._world, request.prompt - request.hit - 1
        worker.claimed += tokens
        begin = max(world.now, worker.free_at)
        speed = worker.speed_at(begin)
        steps = -(-tokens // 1024)
        seconds = speed.step(0, [(request.hit, tokens)]) + (steps - 1) * speed.base_s
        seconds = world.noisy(seconds, speed.jitter)
        worker.free_at = begin + seconds
        write = tokens * 4096 * speed.byte_s
        tail = max(0.0, write - seconds) + write / steps

        def commit() -> None:
            worker.claimed -= tokens
            self.jobs -= 1
            self.tokens -= tokens + 1
            done()
            self._pull()

        world.at(worker.free_at + tail + WAY_S, commit)


@dataclass(slots=True)
class Setup:
    """How one engine is run.

    policy: of its router. None: it is a plain vLLM server.
    threshold: its `router.max_local_prefill_length`.
    chunk: its `--long-prefill-token-threshold`.
    running: its `--max-num-seqs`."""

    policy: RouterPolicy | None
    threshold: int = 512
    chunk: int = 0
    step_tokens: int = 1024
    running: int = MAX_RUNNING
    config: RouterConfig = field(default_factory=RouterConfig)


class DecodeEngine:
    """One decode worker's engine. `add` gives it a request.

    pool: the prefill workers that compute its remote prompts.
    speed_at: the engine's speed at a time.
    errors: time and error of each prediction.
    """

    def __init__(
        self, world: World, setup: Setup, pool: Pool, speed_at: Callable[[float], Speed]
    ) -> None:
        self._world, self._pool, self._speed_at = world, pool, speed_at
        self._running = setup.running
        self._config = RouterConfig(
            policy=setup.policy or RouterPolicy.ALWAYS_LOCAL,
            max_local_prefill_length=setup.threshold,
            max_queue_wait_s=3600,
            max_prefill_queue_size=10_000,
        )
        self._vllm = SimpleNamespace(
            scheduler_config=SimpleNamespace(
                long_prefill_token_threshold=setup.chunk, enable_chunked_prefill=True
            ),
            max_num_scheduled_tokens=setup.step_tokens,
            num_spec_tokens=0,
            running=list[Request](),
        )
        self._chunks = PrefillChunks(SimpleNamespace(scheduler=self._vllm))
        self.model = CostModel(setup.step_tokens, clock=world)
        self._waiting: deque[Request] = deque()
        self._loaded: deque[Request] = deque()
        self._stepping = False
        self.errors: list[tuple[float, float]] = []

    def add(self, request: Request) -> None:
        self._waiting.append(request)
        self._wake()

    def _wake(self) -> None:
        if not self._stepping:
            self._stepping = True
            self._step()

    # ------------------------------------------------------------------ one step

    def _step(self) -> None:
        world, running = self._world, self._vllm.running
        if self._config.policy is RouterPolicy.COST:
            self._plan()
        tokens = self._schedule()
        if not tokens:
            self._stepping = False
            return
        kv_tokens = sum(r.computed for r in running)
        plan = self.model.scheduled(
            {r.name: n for r, n in tokens}, sum(n for _, n in tokens), kv_tokens
        )
        prompts = [(r.computed, n) for r, n in tokens if r.computed + n < r.prompt or n > 1]
        speed = self._speed_at(world.now)
        seconds = world.noisy(speed.step(len(tokens) - len(prompts), prompts), speed.jitter)

        def done() -> None:
            now, over = world.now, list[Request]()
            for request, count in tokens:
                request.computed += count
                if request.computed >= request.prompt:
                    request.token(now)
                    if request.made >= request.output:
                        running.remove(request)
                        over.append(request)
            for _, outcome in self.model.stepped(plan, seconds):
                if outcome.error is not None:
                    self.errors.append((world.now, outcome.error))
            for request in over:
                self.model.finished(request.name)
            self._step()

        world.at(world.now + seconds, done)

    def _plan(self) -> None:
        """As step_meter.py does it, with requests of this simulation."""
        vllm, chunks = self._vllm, self._chunks
        prompts = []
        for r in [*vllm.running, *self._waiting]:
            at = r.computed or r.hit
            if r.prompt - at > 1:
                prompts.append(Prompt(r.name, at, r.prompt - at, r.at + r.ttft_s, r.at))
        streams = sum(r.prompt - r.computed <= 1 for r in vllm.running) + len(self._loaded)
        plan = self.model.plan(prompts, (), max(1, chunks.step_tokens - streams))
        place = {name: number for number, name in enumerate(plan.order)}
        vllm.running.sort(key=lambda r: place.get(r.name, -1))
        fresh = {
            r.name for r in self._waiting
            if not self.model.decided(r.name) and r.at + r.ttft_s > self._world.now
        }  # fmt: skip
        self._waiting = deque(
            sorted(self._waiting, key=lambda r: -1 if r.name in fresh else place.get(r.name, -1))
        )
        config = vllm.scheduler_config
        config.long_prefill_token_threshold = max(plan.tokens.values(), default=0)
        vllm.max_num_scheduled_tokens = min(chunks.step_tokens, streams + plan.total + 1)

    def _schedule(self) -> list[tuple[Request, int]]:
        vllm, found = self._vllm, list[tuple[Request, int]]()
        budget: int = vllm.max_num_scheduled_tokens
        alone = len(vllm.running) + len(self._waiting) + len(self._loaded) <= 1
        cap = 0 if alone else vllm.scheduler_config.long_prefill_token_threshold
        for request in vllm.running:
            if budget <= 0:
                break
            count = 1  # most are streams, which take one token each
            if (wanted := request.prompt - request.computed) > 1:
                count = min(wanted, cap or wanted, budget)
            found.append((request, count))
            budget -= count
        while budget > 0 and len(vllm.running) < self._running and (self._loaded or self._waiting):
            if self._loaded:
                request = self._loaded.popleft()
            else:
                request = self._waiting.popleft()
                if self._place(request):
                    continue
            wanted = request.prompt - request.computed
            count = min(wanted, cap or wanted, budget)
            vllm.running.append(request)
            found.append((request, count))
            budget -= count
        return found

    def _place(self, request: Request) -> bool:
        """Whether the prompt goes to a prefill worker."""
        world, pool, model = self._world, self._pool, self.model
        request.computed = request.hit
        workers = len(pool.workers)
        new = request.prompt - request.hit
        costs = model.predict(
            Queue(workers, pool.jobs, pool.tokens),
            Targets(request.ttft_s, request.itl_s),
            request.hit,
            new,
            world.now - request.at,
        )
        now = Situation(
            request.prompt,
            request.hit,
            config=self._config,
            prefill_workers=workers,
            queue_available=bool(workers),
            costs=costs,
        )
        decision = first(OF_THE_CLUSTER, request, now) or Decision(True, "long_prompt")
        model.admitted(request.name, costs, decision.remote)
        if decision.remote:
            pool.put(request, lambda: self._committed(request))
        return decision.remote

    def _committed(self, request: Request) -> None:
        request.computed = request.prompt - 1
        self.model.settled(request.name, True)
        self._loaded.append(request)
        self._wake()
