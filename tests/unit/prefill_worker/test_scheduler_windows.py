"""Models with windows: every token comes to its place.

The real halves of both connectors run over a model of vLLM's block tables. Other requests take each
block as soon as it is free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from pullfill.decode_worker.scheduler import JobBlocks
from pullfill.engine.groups import BlockOrder
from pullfill.prefill_worker.scheduler import PrefillScheduler
from pullfill.prefill_worker.task import PrefillTask
from pullfill.wire import FenceToken, Grant, PrefillJob, u32
from tests.support.fakes import FakeRequest, step
from tests.support.fuzz import MANY
from tests.support.window_engine import Copier, WindowEngine, Windows

GRANT = Grant(
    rid=1, job_id="j", attempt=1, incarnation="i", deadline_s=60, job_digest=b"",
    fence=FenceToken(slot=0, epoch=1),
)  # fmt: skip
ALL = 10**6


@dataclass
class Case:
    """size: tokens of a block.
    tokens: of the job's prompt.
    chunk: tokens of a step.
    served, decode_served: lengths of prompts that were computed before, here and there.
    lost, decode_lost: which of their cached blocks other requests have taken since.
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
    offloaded: int = 0
    others: int = 0
    late: int = 0
    preempted: int = 0


@dataclass
class Tier:
    """`engine.tier.Tier`, which has the first `tokens` tokens of the prompt."""

    tokens: int

    def hit(self, request: FakeRequest, hit_tokens: int) -> int:
        return 0 if request.skip_reading_prefix_cache else max(0, self.tokens - hit_tokens)

    def claim(self, blocks: Iterable[int]) -> None:
        """Nothing is stored."""


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
        request = FakeRequest("r", [0] * tokens, block_hashes=decode.hashes(tokens))
        self.hit_blocks = JobBlocks(decode.size)
        self.hit_blocks.pool, self.hit_blocks.kept_from = decode, decode.kept
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
        if not self.side.finished(task.request_id):
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
        self.side.plan(step({name: count} if count else {}, [name] if preempted else []))
        if count:
            self.prefill.compute(computed, count)
            self.request.num_computed_tokens += count
        self.side.step_done()
        while len(self.link.queue) > self.case.late:
            self.link.finish()
        self.prefill.scribble(self.case.others)

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
