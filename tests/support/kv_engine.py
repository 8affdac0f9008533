"""A deterministic engine: 'KV' is a chain of hashes over the tokens, computed in real memory.

The KV of a token depends on the KV bytes *in memory* of the token before it, so a prefix that was
not read, was read from the wrong block, or was read too early makes everything after it wrong.
`KvEngine` runs prefill tasks on a thread of its own through the real `PrefillScheduler`, in
the order vLLM does: ask, allocate, plan, compute, write, report.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pullfill.prefill_worker.scheduler import PrefillScheduler
from pullfill.prefill_worker.task import PrefillTask
from pullfill.transfer.contract import KvLayout
from pullfill.transfer.layout import dense_layout
from tests.support.fakes import FakeManager, FakePool, FakeRequest, step

BLOCK = 4
ROW = 8
LAYERS, HEADS, NUM_BLOCKS = 2, 2, 96
LAYOUT: KvLayout = dense_layout(LAYERS, NUM_BLOCKS, HEADS, BLOCK * ROW)

Pages = NDArray[np.uint8]
"""[layer, block, head, byte] over real memory."""


def _row(previous: bytes, token: int, layer: int, head: int) -> bytes:
    text = previous + token.to_bytes(4, "little") + bytes((layer, head))
    return hashlib.blake2b(text, digest_size=ROW).digest()


def compute(
    pages: Pages, table: Sequence[int], tokens: Sequence[int], start: int, end: int
) -> None:
    """KV of `tokens[start:end]` into the blocks of `table`, from what is in memory before it."""
    for at in range(start, end):
        (block, row), (last, last_row) = divmod(at, BLOCK), divmod(at - 1, BLOCK)
        for layer in range(LAYERS):
            for head in range(HEADS):
                previous = b""
                if at:
                    page = pages[layer, table[last], head]
                    previous = page[last_row * ROW : (last_row + 1) * ROW].tobytes()
                new = np.frombuffer(_row(previous, tokens[at], layer, head), np.uint8)
                pages[layer, table[block], head, row * ROW : (row + 1) * ROW] = new


def holds(pages: Pages, table: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether the blocks of `table` hold the KV of `tokens`."""
    size = -(-len(tokens) // BLOCK)
    right = np.zeros((LAYERS, size, HEADS, BLOCK * ROW), np.uint8)
    compute(right, range(size), tokens, 0, len(tokens))
    full, rest = divmod(len(tokens), BLOCK)
    ids = list(table)
    if not np.array_equal(pages[:, ids[:full]], right[:, :full]):
        return False
    return not rest or np.array_equal(
        pages[:, ids[full], :, : rest * ROW], right[:, full, :, : rest * ROW]
    )


@dataclass(slots=True, eq=False)
class _Run:
    task: PrefillTask
    request: FakeRequest
    table: list[int]
    state: str = "waiting"
    aborted: bool = False


class KvEngine:
    """Has PrefillEngine's methods (asyncio side) and a thread that steps.

    chunk: tokens per step.
    gate: while it is cleared, the engine stops before its next step.
    preempt_next: once something is half computed, everything is preempted.
    warm: the prefix cache.
    """

    def __init__(self, pages: Pages, *, chunk: int) -> None:
        self.groups = 1
        self.pages, self.chunk = pages, chunk
        self.gate = threading.Event()
        self.gate.set()
        self.preempt_next = False
        self.pool = FakePool(NUM_BLOCKS)
        self.warm: dict[tuple[int, ...], list[int]] = {}
        self.computed_tokens = 0
        self.failure: BaseException | None = None
        self.side = PrefillScheduler(self._wake)
        self._manager = FakeManager()
        self.side.bind(self._manager)
        self._todo: deque[tuple[str, PrefillTask]] = deque()
        self._runs: dict[str, _Run] = {}
        self._changed = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="kv-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ PrefillEngine

    def submit(self, task: PrefillTask) -> None:
        self.side.tasks[task.request_id] = task
        self._todo.append(("add", task))
        self._wake()

    def end(self, task: PrefillTask) -> None:
        self._todo.append(("end", task))
        self._wake()

    # ------------------------------------------------------------------ for tests

    def cache(self, tokens: Sequence[int]) -> None:
        """Put the whole blocks of a prompt into this engine's prefix cache."""
        table = self.pool.allocate(len(tokens) // BLOCK)
        compute(self.pages, table, tokens, 0, len(table) * BLOCK)
        self.warm[tuple(tokens[: len(table) * BLOCK])] = table

    @property
    def idle(self) -> bool:
        kept = sum(len(t) for t in self.warm.values())
        quiet = not (self._runs or self._todo or self.side.tasks)
        return quiet and len(self.pool.free) == NUM_BLOCKS - kept

    def stop(self) -> None:
        self._stopping = True
        self.gate.set()
        self._wake()
        self._thread.join(10)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure

    def _wake(self) -> None:
        self._changed.set()

    # ------------------------------------------------------------------ engine thread

    def _loop(self) -> None:
        try:
            while not self._stopping:
                self._changed.wait(0.02)  # as the engine's loop looks around by itself
                self._changed.clear()
                while self._step():
                    pass
        except BaseException as exc:
            self.failure = exc

    def _step(self) -> bool:
        """Take one engine step. Returns whether another may do something."""
        self.gate.wait(10)
        while self._todo:
            verb, task = self._todo.popleft()
            (self._add if verb == "add" else self._abort)(task)
        for run in [r for r in self._runs.values() if r.state == "waiting"]:
            self._admit(run)
        running = {rid: r for rid, r in self._runs.items() if r.state == "running"}
        preempted: set[str] = set()
        if self.preempt_next and any(r.request.num_computed_tokens for r in running.values()):
            preempted, self.preempt_next = set(running), False
        scheduled = {
            rid: min(self.chunk, len(r.task.token_ids) - r.request.num_computed_tokens)
            for rid, r in running.items()
            if rid not in preempted
        }
        for rid in preempted:
            running[rid].request.num_preemptions += 1
            running[rid].request.num_computed_tokens = 0
        report = self.side.scheduled(step(scheduled, preempted))
        for rid in preempted:
            self._evict(running[rid])
        for rid, count in scheduled.items():
            run = running[rid]
            at = run.request.num_computed_tokens
            compute(self.pages, run.table, run.task.token_ids, at, at + count)
            self.computed_tokens += count
        for rid in report.loaded | report.failed:
            self._received(self._runs[rid], ok=rid in report.loaded)
        for rid in report.sent:
            self._free(self._runs[rid])
        for rid, count in scheduled.items():
            run = running[rid]
            run.request.num_computed_tokens += count
            if run.request.num_computed_tokens == len(run.task.token_ids):
                self._finish(run)
        self.side.step_done()
        ready = any(run.state == "running" for run in self._runs.values())
        return bool(self._todo or self.side.has_work or ready or preempted)

    def _add(self, task: PrefillTask) -> None:
        if not task.ended:
            request = FakeRequest(task.request_id, task.token_ids)
            self._runs[task.request_id] = _Run(task, request, [])

    def _admit(self, run: _Run) -> None:
        hit = self._hit(run.task.token_ids) if not run.request.num_preemptions else []
        external, _ = self.side.matched(run.request, len(hit) * BLOCK)
        count = run.task.positions - len(hit)
        if len(self.pool.free) < count:
            return
        own = self.pool.allocate(count)
        self.pool.touch([self.pool.blocks[b] for b in hit])
        run.table = [*hit, *own]
        self._manager.tables[run.task.request_id] = run.table
        run.request.num_computed_tokens = len(hit) * BLOCK
        self.side.allocated(run.request, [run.table], external)
        run.state = "reading" if external else "running"

    def _hit(self, tokens: Sequence[int]) -> list[int]:
        """vLLM never hits the last token."""
        best: list[int] = []
        for known, table in self.warm.items():
            same = 0
            while same < min(len(known), len(tokens) - 1) and known[same] == tokens[same]:
                same += 1
            best = max(best, table[: same // BLOCK], key=len)
        return best

    def _received(self, run: _Run, *, ok: bool) -> None:
        if run.aborted:
            self._free(run)
            return
        if ok:
            run.request.num_computed_tokens = run.task.job.hit_tokens
        run.state = "running"

    def _evict(self, run: _Run) -> None:
        """The blocks are gone: somebody else's bytes are in them at once."""
        self.pool.release(run.table)
        for block in set(run.table) & self.pool.free:
            self.pages[:, block] = 0xEE
        run.state = "waiting"

    def _finish(self, run: _Run) -> None:
        keep = self.side.finished(run.request)
        run.state = "finished"
        if not keep:
            self._free(run)

    def _abort(self, task: PrefillTask) -> None:
        run = self._runs.get(task.request_id)
        if run is not None and run.state != "finished":
            reading, run.aborted = run.state == "reading", True
            keep = self.side.finished(run.request)
            assert not (reading and keep), "freed by the report of the read"
            run.state = "finished"
            if not keep and not reading:
                self._free(run)
        self.side.tasks.pop(task.request_id, None)

    def _free(self, run: _Run) -> None:
        self.pool.release(run.table)
        for block in set(run.table) & self.pool.free:
            self.pages[:, block] = 0xDD
        del self._runs[run.task.request_id]
