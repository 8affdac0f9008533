"""How contiguous granted blocks are after hours of load, and what that costs: `make bench-runs`.

The benchmark simulates one decode worker and one prefill worker. Their blocks are managed by vLLM's
own KVCacheManager and block pool. No model runs: computing takes a fixed time for each token.
Requests come as a Poisson process:
  turns   six in ten go on with a conversation
  short   three in ten are new, 100 to 600 tokens
  long    one in ten is new, 4,000 to 16,000 tokens
The decode worker allocates a prompt at once, then a block for every 16 tokens of the answer. The
prefill worker allocates chunk by chunk. While one prompt is written, it computes the next.

A remote prefill copies blocks from the prefill worker to the decode worker. Blocks that lie side by
side on both workers are copied as one piece, a *run* (transfer/runs.py). Long runs copy faster. Two
orders of allocation are compared:
  vllm    vLLM allocates as it does
  sorted  both workers sort the free blocks that vLLM takes next. The same blocks are evicted, and
          only their order differs

The cost comes from results/transfer.json, which has the speed of a write by the length of its runs.
The model has 64 KiB in each layer of a block (16 tokens, 8 KV heads of 128, bfloat16).
Writes results/runs.json and .md.
"""

from __future__ import annotations

import argparse
import heapq
import random
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
import numpy as np

from benchmarks.report import RESULTS, Results, Row, finish, row, versus
from pullfill.transfer.runs import merge_pairs
from tests.support.prefix_cache import BLOCK, Cache

BLOCK_KIB = 64
"""KV of a block in one layer, where neighbouring blocks merge."""
ITL_S, PREFILL_TOKENS_S, WRITE_S = 0.03, 20_000, 0.05
CHUNK, LOCAL, MOST = 2048, 512, 16_000
CONVERSATIONS = 200
ORDERS = ("vllm", "sorted")


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: at which second it comes, the names of its blocks, and its lengths in tokens."""

    at: float
    names: list[bytes]
    prompt: int
    answer: int


def asks(rate: float, seconds: float, seed: int) -> Iterator[Ask]:
    """Yield the requests of so many seconds, in order."""
    rng, serial, now = random.Random(seed), count(), 0.0
    talks: deque[tuple[list[bytes], int]] = deque(maxlen=CONVERSATIONS)

    def more(names: list[bytes], tokens: int) -> list[bytes]:
        missing = tokens // BLOCK - len(names)
        return names + [next(serial).to_bytes(16, "little") for _ in range(missing)]

    while (now := now + rng.expovariate(rate)) < seconds:
        kind, names, had = rng.random(), list[bytes](), 0
        if kind < 0.6 and talks:
            names, had = talks[rng.randrange(len(talks))]
        if kind < 0.6:
            prompt = had + int(rng.lognormvariate(5.5, 1.0)) + 20
        else:
            prompt = rng.randint(100, 600) if kind < 0.9 else rng.randint(4_000, MOST)
        answer = min(int(rng.lognormvariate(5.3, 0.7)) + 1, 1000)
        names = more(names, prompt + answer)
        if prompt + answer <= MOST:
            talks.append((names, prompt + answer))
        yield Ask(now, names, min(prompt, 2 * MOST), answer)


class Worker:
    """The KV cache of one worker. order: one of ORDERS."""

    def __init__(self, blocks: int, order: str) -> None:
        self._manager = Cache(blocks).manager
        self._manager.block_pool.enable_kv_cache_events = False
        self._order = order

    def hit(self, request: Any) -> tuple[Any, int]:
        """Return the cached blocks, and how many tokens they are."""
        blocks, tokens, *_ = self._manager.get_computed_blocks(request)
        return blocks, tokens

    def allocate(self, request: Any, tokens: int, computed: int, hit: tuple[Any, int]) -> bool:
        """Give the request `tokens` more after `computed`. Returns False if there is no room."""
        pool, table = self._manager.block_pool, self.table(request)
        if self._order == "sorted":
            needed = -(-(computed + hit[1] + tokens) // BLOCK) - len(table) - hit[1] // BLOCK
            queue = pool.free_block_queue
            # A hit may be among the first. Then it is not taken, but moved all the same.
            if 1 < needed <= queue.num_free_blocks:
                taken = queue.popleft_n(needed)
                queue.prepend_n(sorted(taken, key=lambda block: block.block_id))
        request.num_computed_tokens = computed
        made = self._manager.allocate_slots(request, tokens, hit[1], hit[0])
        if made is not None:
            request.num_computed_tokens = computed + hit[1] + tokens
        return made is not None

    def table(self, request: Any) -> list[int]:
        """The block ids of the request."""
        found: list[int] = self._manager.get_block_ids(request.request_id)[0]
        return found

    def free(self, request: Any) -> None:
        self._manager.free(request)


@dataclass(slots=True)
class Hour:
    """Counts of one part of the simulated time.

    prompts: remote prefills. blocks: the blocks that they copied. runs: the runs of these blocks.
    decode_runs: runs if only the decode worker's blocks had to be neighbours."""

    prompts: int = 0
    blocks: int = 0
    runs: int = 0
    decode_runs: int = 0

    @property
    def mean(self) -> float:
        return self.blocks / max(1, self.runs)


@dataclass(slots=True)
class Churn:
    """The simulation: both workers, and a queue of events in the order of their times."""

    decode: Worker
    prefill: Worker
    hours: list[Hour]
    part_s: float
    _due: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    _serial: Iterator[int] = field(default_factory=count)
    _waiting: deque[tuple[Ask, Any]] = field(default_factory=deque)
    _jobs: deque[tuple[Ask, Any, int]] = field(default_factory=deque)
    _computing: bool = False

    def run(self, requests: Iterator[Ask]) -> None:
        """Take all requests through both workers."""
        for ask in requests:
            self._until(ask.at)
            self._waiting.append((ask, _request(ask)))
            self._admit(ask.at)
        self._until(float("inf"))

    def _at(self, when: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self._due, (when, next(self._serial), what))

    def _until(self, when: float) -> None:
        while self._due and self._due[0][0] <= when:
            now, _, what = heapq.heappop(self._due)
            what(now)

    def _admit(self, now: float) -> None:
        while self._waiting:
            ask, request = self._waiting[0]
            hit = self.decode.hit(request)
            if not self.decode.allocate(request, max(1, ask.prompt - hit[1]), 0, hit):
                return
            self._waiting.popleft()
            if ask.prompt - hit[1] <= LOCAL:
                self._stream(now, ask, request, ask.prompt)
            else:
                self._jobs.append((ask, request, hit[1] // BLOCK))
                self._compute(now)

    def _compute(self, now: float) -> None:
        """Begin the next prompt on the prefill worker, if that one is free."""
        if self._computing or not self._jobs:
            return
        ask, theirs, first = self._jobs.popleft()
        self._computing = True
        ours = _request(ask)
        hit = self.prefill.hit(ours)
        hit = hit if hit[1] < ask.prompt else (None, 0)

        def chunk(now: float) -> None:
            done = ours.num_computed_tokens
            some = (None, 0) if self.prefill.table(ours) else hit
            tokens = min(CHUNK, ask.prompt - done - some[1])
            if tokens <= 0 or not self.prefill.allocate(ours, tokens, done, some):
                # Written, or without room: a block that still travels frees none.
                self._computing = False
                self._at(now + WRITE_S, lambda now: self._commit(now, ask, ours, theirs, first))
                self._compute(now)
                return
            self._at(now + tokens / PREFILL_TOKENS_S, chunk)

        chunk(now)

    def _commit(self, now: float, ask: Ask, ours: Any, theirs: Any, first: int) -> None:
        whole = ask.prompt // BLOCK
        source, target = (
            np.array(worker.table(request)[first:whole], np.int64)
            for worker, request in ((self.prefill, ours), (self.decode, theirs))
        )
        if len(source) == len(target) > 0:
            hour = self.hours[min(int(ask.at / self.part_s), len(self.hours) - 1)]
            hour.prompts += 1
            hour.blocks += len(source)
            hour.runs += len(merge_pairs(source, target)[2])
            hour.decode_runs += 1 + int(np.count_nonzero(np.diff(target) != 1))
        self.prefill.free(ours)
        self._stream(now, ask, theirs, ask.prompt)

    def _stream(self, now: float, ask: Ask, request: Any, tokens: int) -> None:
        """Let the answer grow by a block."""
        some = min(BLOCK, ask.prompt + ask.answer - tokens)
        if some <= 0 or not self.decode.allocate(request, some, tokens, (None, 0)):
            self.decode.free(request)  # one without room ends here
            self._admit(now)
            return
        self._at(now + some * ITL_S, lambda now: self._stream(now, ask, request, tokens + some))


_serial = count()


def _request(ask: Ask) -> Any:
    """vLLM's Request, whose block hashes are the names."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request(
        f"r{next(_serial)}", [0] * (ask.prompt + ask.answer), SamplingParams(max_tokens=1), None,
        block_hasher=lambda _: ask.names[: (ask.prompt + ask.answer) // BLOCK],
    )  # fmt: skip


def speeds(file: str) -> dict[str, dict[int, float]]:
    """Return GB/s of writes by KiB of a run, for each transport that bench-transfer measures."""
    found: dict[str, dict[int, float]] = {}
    results = msgspec.json.decode((RESULTS / file).read_bytes(), type=Results)
    for one in results.rows:
        told = re.fullmatch(r"(shm|tcp) write, (\d+) KiB scattered", one.metric)
        if told and one.value:
            found.setdefault(told[1], {}).setdefault(int(told[2]), one.value)
        if told and one.peer == "NIXL/UCX" and one.peer_value:
            found.setdefault("nixl", {})[int(told[2])] = one.peer_value
    return found


def speed(by_size: dict[int, float], kib: float) -> float:
    """Return GB/s for runs of `kib` KiB, between the sizes that were measured."""
    sizes = sorted(by_size)
    return float(np.interp(np.log(kib), np.log(sizes), [by_size[size] for size in sizes]))


def rows_of(found: dict[str, list[Hour]], part_h: float) -> list[Row]:
    """Return the mean run length of each part, and what the last one costs each transport."""
    rows = []
    for order, hours in found.items():
        for number, hour in enumerate(hours):
            upto = f"{order}: blocks of a run, hour {part_h * (number + 1):g}"
            rows.append(row(upto, hour.mean, f"blocks, of {hour.prompts} prompts"))
        alone = hours[-1].blocks / max(1, hours[-1].decode_runs)
        rows.append(row(f"{order}: neighbours on the decode worker alone", alone, "blocks"))
    last = {order: hours[-1].mean for order, hours in found.items()}
    for transport, by_size in speeds("transfer.json").items():
        one, best = speed(by_size, BLOCK_KIB), max(by_size.values())
        for order, blocks in last.items():
            name = f"{transport}: write with runs of {order}"
            rows.append(versus(name, speed(by_size, blocks * BLOCK_KIB), "GB/s", "best", best))
        rows.append(versus(f"{transport}: write block by block", one, "GB/s", "best", best))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=4.0, help="of simulated load")
    parser.add_argument("--parts", type=int, default=4, help="into which they are cut")
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second")
    parser.add_argument("--blocks", type=int, default=8192, help="of each worker, 16 tokens each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="write results/runs.json and .md")
    options = parser.parse_args()
    found, part_s = {}, 3600 * options.hours / options.parts
    for order in ORDERS:
        began = time.monotonic()
        churn = Churn(
            Worker(options.blocks, order), Worker(options.blocks, order),
            [Hour() for _ in range(options.parts)], part_s,
        )  # fmt: skip
        churn.run(asks(options.rate, 3600 * options.hours, options.seed))
        found[order] = churn.hours
        print(f"{order}: {options.hours:g} h simulated in {time.monotonic() - began:.0f} s")
    rows = rows_of(found, options.hours / options.parts)
    title = "How contiguous granted blocks stay"
    return finish("runs", rows, quiet=True, save=options.save, title=title)


if __name__ == "__main__":
    sys.exit(main())
