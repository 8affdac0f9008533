"""A decode worker of the simulator: a queue, continuous batching and a prefix cache.

One step computes one token for each running answer and at most `chunk` tokens of prompts, first
come, first served. Its time is linear in what it computes (`Speed`). Steps without prompts are
taken many at a time: their end is known.

The worker prefills its own prompts. Remote prefill changes who computes the rest of a prompt, not
which decode worker holds its prefix, so it is left out.

The cache holds whole blocks by hash. A block that no request uses may be evicted, the one that was
released longest ago first. Of one request the last blocks count as released first, as in vLLM.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

from benchmarks.sim.workloads import Req

Figures = tuple[int, int, int]
"""A load report: prompt tokens to compute, KV blocks in use, and blocks that are free."""


@dataclass(slots=True, frozen=True)
class Speed:
    """How fast an engine is.

    token_s: seconds per prompt token computed. All other times are multiples of it.
    step: fixed time of a step. stream: time of one running answer. cached: time of reading the KV
    of one token. All three in prompt tokens.
    chunk: most prompt tokens of one step.
    running: most requests at once.
    """

    token_s: float
    step: float = 80.0
    stream: float = 1.0
    cached: float = 0.001
    chunk: int = 2048
    running: int = 256


class Cache:
    """A worker's KV blocks, `capacity` of them, found by chain hash.

    stored, removed: hashes since `take` was called last, in order."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._reserved = 0
        self._events: list[tuple[bool, list[int]]] = []

    @property
    def active(self) -> int:
        """Blocks that requests use."""
        return len(self._users) + self._reserved

    @property
    def free(self) -> int:
        """Blocks that a request may take: unused, or cached and idle."""
        return self.capacity - self.active

    def hit(self, hashes: list[int]) -> int:
        """Number of leading blocks that are cached."""
        # A request that uses a block uses all blocks in front of it, and releases them after it. So
        # a block is evicted before the blocks in front of it, and the cached blocks are the
        # leading ones.
        users, idle = self._users, self._idle
        return bisect.bisect_left(
            hashes, True, key=lambda name: name not in users and name not in idle
        )

    def admit(self, hashes: list[int], hit: int, fresh: int) -> bool:
        """Pin the `hit` leading blocks and reserve `fresh` others. False: there is no room."""
        held = hashes[:hit]
        if sum(map(self._idle.__contains__, held)) + fresh > self.free:
            return False
        self._pin(held)
        self._reserved += fresh
        self._shrink()
        return True

    def store(self, hashes: list[int]) -> None:
        """Turn reserved blocks into cached ones, which their request goes on using."""
        users, idle = self._users, self._idle
        new = [name for name in hashes if name not in users and name not in idle]
        self._pin(hashes)
        self._reserved -= len(hashes)
        if new:
            self._events.append((True, new))
        self._shrink()

    def release(self, hashes: list[int], reserved: int) -> None:
        """A request ends. reserved: blocks that it never filled."""
        self._reserved -= reserved
        users, idle = self._users, self._idle
        for name in reversed(hashes):
            left = users[name] - 1
            if left:
                users[name] = left
            else:
                del users[name]
                idle[name] = None

    def take(self) -> list[tuple[bool, list[int]]]:
        """Return what was stored (True) or removed (False) since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _pin(self, hashes: list[int]) -> None:
        users, idle = self._users, self._idle
        for name in hashes:
            before = users.get(name, 0)
            users[name] = before + 1
            if not before:
                idle.pop(name, None)

    def _shrink(self) -> None:
        gone = []
        while self._idle and len(self._users) + self._reserved + len(self._idle) > self.capacity:
            gone.append(self._idle.popitem(last=False)[0])
        if gone:
            self._events.append((False, gone))


@dataclass(slots=True, eq=False)
class Job:
    """A request at a worker.

    arrived: time of arrival at the frontend, in seconds.
    first_at, ended_at: time of the first token and of the end at the worker, in seconds.
    worker, frontend: number of the worker, and of the frontend that sent the request.
    share: what the frontend counted at the worker.
    uncached: prompt tokens left to compute. Before the start: those that the cache lacked.
    computed: prompt tokens computed.
    hit, stored: leading blocks in the cache: at the start, and now.
    blocks: number of blocks that the request has reserved.
    made: tokens of the answer so far.
    """

    req: Req
    arrived: float
    worker: int = -1
    share: Any = None
    frontend: int = 0
    uncached: int = 0
    computed: int = 0
    hit: int = 0
    stored: int = 0
    blocks: int = 0
    made: int = 0
    first_at: float = math.nan
    ended_at: float = math.nan


@dataclass(slots=True, eq=False)
class Step:
    """What the worker does now: `count` equal steps of `length` seconds from `begun` on."""

    begun: float
    length: float
    count: int
    prompts: list[tuple[Job, int]] = field(default_factory=list)

    @property
    def end(self) -> float:
        return self.begun + self.count * self.length


class Worker:
    """One worker. The cluster calls `add`, and at the time `step.end` it calls `finish`.

    version: grows whenever `step` is replaced or gets another end."""

    def __init__(self, name: str, blocks: int, block: int, speed: Speed) -> None:
        self.name = name
        self.block = block
        self.speed = speed
        self.cache = Cache(blocks)
        self.waiting: deque[Job] = deque()
        self.prompts: list[Job] = []
        self.answers: list[Job] = []
        self.step: Step | None = None
        self.version = 0

    # ---------------------------------------------------------------- load

    def queued_tokens(self) -> int:
        """Prompt tokens that are not computed yet."""
        return sum(job.uncached for job in self.prompts) + sum(job.uncached for job in self.waiting)

    def figures(self) -> Figures:
        """Return the figures of a load report: prompt tokens queued, blocks in use, blocks free."""
        return self.queued_tokens(), self.cache.active, self.cache.free

    # ---------------------------------------------------------------- work

    def add(self, job: Job, now: float) -> None:
        """Take a request. It starts with the next step."""
        job.uncached = job.req.tokens - self._hit(job) * self.block
        self.waiting.append(job)
        if self.step is None:
            self._begin(now)
        elif not self.step.prompts:
            step = self.step  # answers only: stop after the step that runs now
            step.count = min(step.count, max(1, math.ceil((now - step.begun) / step.length)))
            self.version += 1

    def finish(self) -> tuple[list[Job], list[Job]]:
        """End the current step. Returns the jobs whose first token came, and those that ended."""
        step = self.step
        assert step is not None
        now = step.end
        ended = []
        for job in self.answers:
            job.made += step.count
            if job.made >= job.req.output:
                ended.append(job)
        first = self._computed(step, now)
        ended += [job for job in first if job.made >= job.req.output]
        for job in ended:
            self._end(job, now)
        done = set(map(id, ended))
        self.answers = [j for j in (*self.answers, *first) if id(j) not in done]
        self.step = None
        self._begin(now)
        return first, ended

    def _computed(self, step: Step, now: float) -> list[Job]:
        first = []
        for job, tokens in step.prompts:
            job.computed += tokens
            job.uncached -= tokens
            whole = min(len(job.req.hashes), job.hit + job.computed // self.block)
            if job.uncached == 0:
                whole = len(job.req.hashes)
                job.made, job.first_at = 1, now
                first.append(job)
                self.prompts.remove(job)
            self.cache.store(job.req.hashes[job.stored : whole])
            job.stored = max(job.stored, whole)
        return first

    def _end(self, job: Job, now: float) -> None:
        job.ended_at = now
        hashes = job.req.hashes
        if job.req.answer:
            self.cache.store(job.req.answer)
            hashes = hashes + job.req.answer
        self.cache.release(hashes, job.blocks - (len(hashes) - job.hit))

    def _begin(self, now: float) -> None:
        self._start_waiting()
        speed = self.speed
        left, parts = speed.chunk, []
        for job in self.prompts:
            tokens = min(job.uncached, left)
            parts.append((job, tokens))
            left -= tokens
            if not left:
                break
        if not parts and not self.answers:
            return
        held = sum(job.req.tokens + job.made for job in self.answers)
        work = speed.step + speed.stream * len(self.answers) + speed.cached * held
        count = 1
        if not parts:
            count = min(job.req.output - job.made for job in self.answers)
        length = (work + speed.chunk - left) * speed.token_s
        self.step = Step(now, length, max(1, count), parts)
        self.version += 1

    def _start_waiting(self) -> None:
        while self.waiting and len(self.prompts) + len(self.answers) < self.speed.running:
            job = self.waiting[0]
            hit = self._hit(job)
            total = math.ceil((job.req.tokens + job.req.output) / self.block)
            fresh = max(total, len(job.req.hashes) + len(job.req.answer)) - hit
            if not self.cache.admit(job.req.hashes, hit, fresh):
                if self.prompts or self.answers:
                    return
                raise ValueError(f"request {job.req.number} does not fit: {fresh} blocks")
            job.hit = job.stored = hit
            job.blocks = fresh
            job.uncached = job.req.tokens - hit * self.block
            self.prompts.append(self.waiting.popleft())

    def _hit(self, job: Job) -> int:
        """Cached leading blocks. At least one token is left to compute, as in vLLM."""
        most = (job.req.tokens - 1) // self.block
        return min(self.cache.hit(job.req.hashes), most)
