"""Models with windows: every token comes to its place.

The real halves of both connectors run over a model of vLLM's block tables. Other requests take each
block as soon as it is free.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pullfill.decode_worker.scheduler import JobBlocks
from pullfill.engine.groups import BlockOrder
from pullfill.prefill_worker.scheduler import PrefillScheduler
from pullfill.prefill_worker.task import PrefillTask
from pullfill.wire import FenceToken, Grant, PrefillJob, u32
from tests.support.fakes import FakePool, FakeRequest, FakeTier, FakeTransferWorker, step
from tests.support.fuzz import MANY

GRANT = Grant(
    rid=1, job_id="j", attempt=1, incarnation="i", deadline_s=60, job_digest=b"",
    fence=FenceToken(slot=0, epoch=1),
)  # fmt: skip
ALL = 10**6

# --------------------------------------------------------------------------- vLLM for one prompt
# Its block tables, with windows, and a memory that knows which token lies where. All prompts are
# the beginnings of one text. So the KV of a token is its label, (group, token). What an engine
# computes is checked: everything that a window sees must be there.

Label = tuple[int, int] | None
Windows = tuple[int | None, ...]
"""For each KV cache group, how many tokens a layer sees. None: all."""
NULL = 0


class WindowEngine(FakePool):
    """vLLM's scheduler, KVCacheManager and BlockPool, as far as one request goes.

    size: tokens of a block.
    memory: the tokens of each block.
    tables: the block ids of the request, for each group."""

    def __init__(self, size: int, windows: Windows, num_blocks: int = 250) -> None:
        super().__init__(num_blocks, size)
        assert self.allocate(1) == [NULL]
        self.size, self.windows = size, windows
        self.memory: list[list[Label]] = [[None] * size for _ in range(num_blocks)]
        self.tables: list[list[int]] = [[] for _ in windows]

    def allocate(self, count: int) -> list[int]:
        """Cached blocks last."""
        cached = set(self.cached.values())
        found = sorted(self.free, key=lambda block: (block in cached, block))[:count]
        self.touch([self.blocks[block] for block in found])
        self._forget(found)
        return found

    def scribble(self, taken: Collection[int]) -> None:
        """Have other requests take these free blocks, fill them with other KV, and end."""
        self._forget(taken)
        for at in taken:
            self.memory[at] = [(-1, -1)] * self.size

    def lose(self, which: Iterable[int]) -> None:
        """Have other requests take some of the free cached blocks. which: their numbers."""
        free = [block for _, block in sorted(self.cached.items()) if block in self.free]
        self.scribble({free[number] for number in which if number < len(free)})

    def _forget(self, blocks: Collection[int]) -> None:
        self.cached = {key: block for key, block in self.cached.items() if block not in blocks}

    # ------------------------------------------------------------------ KVCacheManager

    def kept(self, tokens: int) -> tuple[int, ...]:
        """As `engine.groups.kept_from` says."""
        skipped = (0 if w is None else max(0, tokens - w + 1) for w in self.windows)
        return tuple(count // self.size for count in skipped)

    def get_block_ids(self, _request_id: str) -> tuple[list[int], ...]:
        return tuple(map(list, self.tables))

    def hashes(self, tokens: int) -> list[str]:
        return [str(at) for at in range(tokens // self.size)]

    def hit(self, tokens: int) -> int:
        """Length of the longest prefix hit of at most so many tokens."""
        for blocks in range(tokens // self.size, 0, -1):
            kept = self.kept(blocks * self.size)
            if all(
                (str(at), group) in self.cached
                for group, first in enumerate(kept)
                for at in range(first, blocks)
            ):
                return blocks * self.size
        return 0

    # ------------------------------------------------------------------ Scheduler

    def start(self, hit: int, external: int) -> None:
        """Give the request its hit, and blocks for what the connector brings."""
        gone = self.kept(hit + external)
        for group, table in enumerate(self.tables):
            for at in range(hit // self.size):
                block = NULL if at < gone[group] else self.cached[str(at), group]
                table.append(block)
                self.touch([self.blocks[block]] if block != NULL else [])
        if external:
            self._extend(hit + external, gone)

    def step(self, computed: int, count: int) -> None:
        """Allocate blocks for the next tokens, free those behind the windows, and cache."""
        gone = self.kept(computed)
        for group, table in enumerate(self.tables):
            for at in range(min(gone[group], len(table))):
                if table[at] != NULL:
                    self.release([table[at]])
                    table[at] = NULL
        self._extend(computed + count, gone)
        self.cache(computed + count)

    def _extend(self, tokens: int, gone: Sequence[int]) -> None:
        for group, table in enumerate(self.tables):
            for at in range(len(table), -(-tokens // self.size)):
                table += [NULL] if at < gone[group] else self.allocate(1)

    def cache(self, tokens: int) -> None:
        """Put the full blocks into the prefix cache."""
        for group, table in enumerate(self.tables):
            for at, block in enumerate(table[: tokens // self.size]):
                if block != NULL:
                    self.cached.setdefault((str(at), group), block)

    def compute(self, computed: int, count: int) -> None:
        """Compute the next tokens. Each sees its window."""
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, computed - window + 1)
            for token in range(first, computed):
                assert self._at(group, token) == (group, token), "what a window sees"
        self.fill(computed, count)

    def fill(self, first: int, count: int) -> None:
        """Put the KV of these tokens into the blocks that are there."""
        for group, table in enumerate(self.tables):
            for token in range(first, first + count):
                at, inside = divmod(token, self.size)
                if table[at] != NULL:
                    self.memory[table[at]][inside] = (group, token)

    def _at(self, group: int, token: int) -> Label:
        return self.memory[self.tables[group][token // self.size]][token % self.size]

    def end(self) -> None:
        """Free the blocks of the request."""
        for table in self.tables:
            self.release(at for at in table if at != NULL)
            table.clear()

    def serve(self, tokens: int, chunk: int) -> None:
        """Compute a whole prompt, and keep it in the prefix cache."""
        computed = self.hit(tokens - 1)
        self.start(computed, 0)
        while computed < tokens:
            count = min(chunk, tokens - computed)
            self.step(computed, count)
            self.compute(computed, count)
            computed += count
        self.end()

    def check_cache(self) -> None:
        """A cached block holds all of its tokens, and nothing is referred to by nobody."""
        for (at, group), block in self.cached.items():
            first = int(at) * self.size
            tokens = [(group, token) for token in range(first, first + self.size)]
            assert self.memory[block] == tokens, "a cached block"

    def check_free(self) -> None:
        """No block is held any more."""
        assert self.free == set(range(1, len(self.blocks)))


class Copier(FakeTransferWorker):
    """Copies the labels of blocks, when `finish` is called."""

    def __init__(self, ours: WindowEngine, theirs: WindowEngine) -> None:
        super().__init__()
        self._ours, self._theirs = ours, theirs

    def finish(self, failure: BaseException | None = None) -> Any:
        copy = self.queue[0]
        for here, there in zip(copy.local, copy.remote, strict=True):
            assert NULL not in (here, there), "vLLM's null block holds no KV"
            ours, theirs = self._ours.memory[here], self._theirs.memory[there]
            source, target = (theirs, ours) if copy.verb == "read" else (ours, theirs)
            target[:] = source
        return super().finish(failure)


# --------------------------------------------------------------------------- both sides


@dataclass
class Case:
    """size: tokens of a block.
    tokens: of the job's prompt.
    chunk: tokens of a step.
    served, decode_served: lengths of prompts that were computed before, here and there.
    lost, decode_lost: which of their cached blocks other requests have taken since.
    dropped: which ones the decode worker loses when it allocates blocks for the prompt.
    offloaded: tokens of the prompt that vLLM has offloaded here. 0: it offloads nothing.
    others: how many free blocks other requests take after each step.
    late: how many steps a copy takes.
    preempted: before which step the request is preempted. 0: never."""

    size: int
    windows: Windows
    tokens: int
    chunk: int = 5
    served: list[int] = field(default_factory=list)
    decode_served: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    decode_lost: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    offloaded: int = 0
    others: int = 0
    late: int = 0
    preempted: int = 0


class Tier(FakeTier):
    """`engine.tier.Tier`, which has the first `found` tokens of the prompt."""

    def hit(self, request: FakeRequest, hit_tokens: int) -> int:
        return 0 if request.skip_reading_prefix_cache else max(0, (self.found or 0) - hit_tokens)


class Handoff:
    """One job from its opening to its commit."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.decode = WindowEngine(case.size, case.windows)
        self.prefill = WindowEngine(case.size, case.windows)
        for engine, prompts, lost in (
            (self.decode, case.decode_served, case.decode_lost),
            (self.prefill, case.served, case.lost),
        ):
            for tokens in prompts:
                engine.serve(tokens, case.chunk)
            engine.lose(lost)
        self.link = Copier(self.prefill, self.decode)
        self.ends: list[BaseException | None] = []
        self.asked = 0
        """How often vLLM has looked for a prefix hit."""

    def open(self) -> PrefillJob | None:
        """The decode worker's part. None: it has the whole prompt."""
        decode, tokens = self.decode, self.case.tokens
        self.hit = decode.hit(tokens)
        if self.hit == tokens:
            return None
        decode.start(self.hit, tokens - self.hit)
        decode.lose(self.case.dropped)
        request = FakeRequest("r", [0] * tokens, block_hashes=decode.hashes(tokens))
        self.hit_blocks = JobBlocks(decode.size, decode, decode.kept)
        kept, first = decode.kept(tokens), self.hit // decode.size
        tables = decode.get_block_ids("r")
        read_from, prefix = self.hit_blocks.read(request, tables, self.hit, kept)
        self.named = BlockOrder(kept).ids(tables, first, -(-tokens // decode.size))
        return PrefillJob(
            job_id="j", incarnation="i", decode_instance="d", request_id="r", compat="c",
            token_ids=u32.pack([0] * tokens), hit_tokens=self.hit,
            block_ids=u32.pack([*prefix, *self.named]), read_from=read_from, kept_from=kept,
            timeout_s=60.0,
        )  # fmt: skip

    def run(self, job: PrefillJob) -> None:
        """The prefill worker's part."""
        tokens = self.case.tokens
        task = PrefillTask(job, GRANT, [0] * tokens, self.case.size, self.link, self.ends.append)
        assert task.targets == self.named
        self.side = PrefillScheduler(lambda: None)
        self.side.tasks[task.request_id] = task
        self.side.bind(self.prefill, self.prefill.kept)
        size = self.prefill.size
        self.tier = Tier(min(self.case.offloaded, tokens - 1) // size * size)
        if self.case.offloaded:
            self.side.tier = self.tier  # type: ignore[assignment]
        hashes = self.prefill.hashes(tokens)
        self.request = FakeRequest(task.request_id, task.token_ids, block_hashes=hashes)
        self._admit()
        steps = 0
        while (computed := self.request.num_computed_tokens) < tokens:
            steps += 1
            if steps == self.case.preempted:
                self.prefill.end()
                self._step(0, 0, preempted=True)
                self.prefill.check_free()
                self._admit()
                continue
            self._step(computed, min(self.case.chunk, tokens - computed))
            if self.ends:
                break
        if not self.side.finished(self.request):
            self.prefill.end()
        self.link.flush()
        if self.prefill.tables[0]:
            assert self.side.before_step().sent == {task.request_id}
            self.prefill.end()
        assert task.written_blocks == len(self.named)

    def _admit(self) -> None:
        while True:
            self.asked += 1
            assert self.asked < 10, "vLLM looks for a hit again and again"
            skip = self.request.skip_reading_prefix_cache
            hit = 0 if skip else self.prefill.hit(self.case.tokens - 1)
            external, _ = self.side.matched(self.request, hit)
            if external is not None or skip:
                break
            self._step(0, 0)
        external = 0 if skip or external is None else external
        offloaded = 0 if external else self.tier.hit(self.request, hit)
        self.prefill.start(hit, external + offloaded)
        self.external = external
        self.side.allocated(self.request, self.prefill.get_block_ids("j.1"), external)
        self.request.num_computed_tokens = hit + external + offloaded
        self.prefill.fill(hit, offloaded)
        self.prefill.cache(hit + offloaded)
        if external:
            self._step(0, 0)
            self.link.flush()
            self.side.before_step()
            self.prefill.cache(hit + external)

    def _step(self, computed: int, count: int, preempted: bool = False) -> None:
        name = self.request.request_id
        if count:
            self.prefill.step(computed, count)
        self.side.scheduled(step({name: count} if count else {}, [name] if preempted else []))
        if count:
            self.prefill.compute(computed, count)
            self.request.num_computed_tokens += count
        self.side.step_done()
        while len(self.link.queue) > self.case.late:
            self.link.finish()
        self.prefill.scribble(sorted(self.prefill.free)[: self.case.others])

    def check(self, before: list[list[object]]) -> None:
        """before: the decode worker's memory before the job."""
        assert self.ends == [None]
        decode, tokens = self.decode, self.case.tokens
        expected = before
        end = -(-tokens // decode.size) * decode.size
        for group, kept in enumerate(decode.kept(tokens)):
            for token in range(max(kept * decode.size, self.hit), end):
                at, inside = divmod(token, decode.size)
                block = decode.tables[group][at]
                if token < tokens:
                    expected[block][inside] = (group, token)
                else:  # the rest of a block is whatever the prefill worker has there
                    expected[block][inside] = decode.memory[block][inside]
        assert decode.memory == expected
        decode.cache(tokens)
        self.hit_blocks.read_no_more("r")
        decode.end()
        for engine in (decode, self.prefill):
            engine.check_cache()
            engine.check_free()


def handed_over(handoff: Handoff) -> PrefillJob | None:
    """Run the job and check it. None: there is none."""
    job = handoff.open()
    if job is not None:
        before: list[list[object]] = [list(block) for block in handoff.decode.memory]
        handoff.run(job)
        handoff.check(before)
    return job


WINDOWS: list[Windows] = [(None, 6), (8,), (None, 1, 13), (12, 12, None), (None,), (5, 20)]
SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 12])
LOST = st.lists(st.integers(0, 30), max_size=4)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tokens = draw(st.integers(1, 50))
    prompts = st.lists(st.integers(max(1, tokens - 20), tokens + 6), max_size=2)
    return Case(
        size=draw(SIZES),
        windows=draw(st.sampled_from(WINDOWS)),
        tokens=tokens,
        chunk=draw(st.integers(1, 30)),
        served=draw(prompts),
        decode_served=draw(prompts),
        lost=draw(LOST),
        decode_lost=draw(LOST),
        dropped=draw(LOST),
        offloaded=draw(st.integers(0, 50)),
        others=draw(st.sampled_from([0, 1, 5, ALL])),
        late=draw(st.integers(0, 3)),
        preempted=draw(st.integers(0, 3)),
    )


@settings(max_examples=MANY or 300)
@given(cases())
def test_every_token_comes_to_its_place_and_nothing_else_is_touched(case: Case) -> None:
    handed_over(Handoff(case))


def test_a_hit_is_read_from_the_block_on_where_the_window_begins() -> None:
    """The hit has 28 tokens. Its window begins at token 22."""
    handoff = Handoff(Case(size=2, windows=(None, 6), tokens=40, decode_served=[29]))
    job = handed_over(handoff)
    assert job is not None
    assert (job.hit_tokens, job.read_from, handoff.external) == (28, (0, 11), 28)
