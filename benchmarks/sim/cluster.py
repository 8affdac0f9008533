"""The simulated cluster: workers, frontends, and the time that messages take between them.

A frontend is the production code: `Placer` and `PrefixIndex`. The simulator stands for the
network and the clock. Events are in a heap; equal times go in the order in which the events were
made. So one seed gives one result.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.sim.worker import Figures, Job, Speed, Worker
from benchmarks.sim.workloads import Req, Workload, mix
from pullfill.frontend.routing.choice import KNOWN, Candidates, HeldBlocks, Placer, Prompt
from pullfill.prefix.index import PrefixIndex
from pullfill.wire import DecodePolicy


@dataclass(slots=True, frozen=True)
class Net:
    """Times in seconds.

    send: a request, an answer or a report on its way.
    events: how late a frontend's index has the KV events of a step.
    report: least time between two load reports of a worker.
    """

    send: float = 0.001
    events: float = 0.05
    report: float = 0.05


@dataclass(slots=True, frozen=True)
class Setup:
    """The settings of one run.

    blocks: cache of each worker, in KV blocks."""

    policy: DecodePolicy
    speed: Speed
    workers: int = 4
    blocks: int = 20_000
    frontends: int = 1
    net: Net = Net()
    seed: int = 1


class Frontend:
    """One frontend: the production code that chooses a worker.

    number: of this frontend. It is part of the seed.
    block: tokens per block.
    texts: at least the number of different blocks in the workload.
    times: CPU seconds of each decision on this machine, the lookup in the index included."""

    def __init__(self, setup: Setup, number: int, block: int, texts: int) -> None:
        self.placement = Placer(random.Random(mix(setup.seed, number)))
        self.placement.chooser.peers = setup.frontends
        self.index = PrefixIndex(max(1 << 16, min(2 * setup.workers * setup.blocks, texts)))
        self.times: list[float] = []
        self._setup = setup
        self._block = block
        self._names: dict[int, str] = {}
        self._among: Candidates

    def join(self, names: list[str]) -> None:
        """Set the workers to choose from. The index knows each by its place in the list."""
        self._names = dict(enumerate(names))
        self._among = self.placement.candidates(names)

    def send(self, job: Job, now: float) -> str:
        """Choose a worker for the request, and count the request there. Returns its name."""
        req, block, placement = job.req, self._block, self.placement
        hashes = req.hashes
        begun = time.thread_time()
        found, more = self.index.deepest(hashes, KNOWN)
        held = HeldBlocks({self._names[n]: blocks for n, blocks in found.items()}, more)
        prompt = Prompt(req.tokens, block, hashes)
        choice = placement.choose(self._setup.policy, prompt, self._among, now, held)
        self.times.append(time.thread_time() - begun)
        job.share = placement.send(choice, prompt, now)
        return choice.view.instance_id


@dataclass(slots=True, eq=False)
class Cluster:
    """One run of a workload: `run`, then read `jobs` and `workers`."""

    setup: Setup
    workload: Workload
    workers: list[Worker] = field(default_factory=list)
    frontends: list[Frontend] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    _heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = field(
        default_factory=list
    )
    _order: Any = field(default_factory=itertools.count)
    _by_name: dict[str, int] = field(default_factory=dict)
    _reports: list[float] = field(default_factory=list)
    _followers: dict[int, list[Req]] = field(default_factory=dict)

    def run(self) -> Cluster:
        """Run until every request has ended. Returns itself."""
        setup, block = self.setup, self.workload.block
        texts = self.workload.blocks()
        self.frontends = [Frontend(setup, n, block, texts) for n in range(setup.frontends)]
        self._join(setup.workers)
        for req in self.workload.requests:
            if req.follows is None:
                self._at(req.at, self._arrive, req)
            else:
                self._followers.setdefault(req.follows.number, []).append(req)
        while self._heap:
            now, _, call, args = heapq.heappop(self._heap)
            call(now, *args)
        return self

    def _at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._heap, (when, next(self._order), call, args))

    def _join(self, count: int) -> None:
        for _ in range(count):
            name = f"decode-{len(self.workers):04d}"
            self._by_name[name] = len(self.workers)
            self.workers.append(
                Worker(name, self.setup.blocks, self.workload.block, self.setup.speed)
            )
            self._reports.append(-1.0)
        for frontend in self.frontends:
            frontend.join([worker.name for worker in self.workers])

    def _arrive(self, now: float, req: Req) -> None:
        # One client's requests come over connections to all frontends.
        job = Job(req, now, frontend=len(self.jobs) % len(self.frontends))
        self.jobs.append(job)
        job.worker = self._by_name[self.frontends[job.frontend].send(job, now)]
        self._at(now + self.setup.net.send, self._reach, job.worker, job)

    def _reach(self, now: float, number: int, job: Job) -> None:
        worker = self.workers[number]
        before = worker.version
        worker.add(job, now)
        self._follow(now, number, before)

    def _step(self, now: float, number: int, version: int) -> None:
        worker = self.workers[number]
        if version != worker.version:
            return  # the steps end earlier than planned, because a request has come
        first, ended = worker.finish()
        events = worker.cache.take()
        if events:
            self._at(now + self.setup.net.events, self._events, number, events)
        if first or ended:
            self._at(now + self.setup.net.send, self._outputs, first, ended)
        self._follow(now, number, version)

    def _follow(self, now: float, number: int, before: int) -> None:
        worker = self.workers[number]
        if worker.step is not None and worker.version != before:
            self._at(worker.step.end, self._step, number, worker.version)
        last = self._reports[number]
        if last > now:
            return  # a report is due already, and it will contain this change
        self._reports[number] = when = max(now, last + self.setup.net.report)
        self._at(when, self._report, number)

    def _report(self, now: float, number: int) -> None:
        worker = self.workers[number]
        self._at(now + self.setup.net.send, self._reported, worker.name, worker.figures())

    def _reported(self, now: float, name: str, figures: Figures) -> None:
        for frontend in self.frontends:
            frontend.placement.fleet.report(name, *figures)

    def _events(self, now: float, number: int, events: list[tuple[bool, Any]]) -> None:
        for frontend in self.frontends:
            for stored, names in events:
                frontend.index.apply(number, bytes([stored]) * len(names), names)

    def _outputs(self, now: float, first: list[Job], ended: list[Job]) -> None:
        for job in first:
            job.share.first()
        for job in ended:
            job.share.end(job.made)
            for req in self._followers.get(job.req.number, ()):
                self._at(now + req.at, self._arrive, req)
