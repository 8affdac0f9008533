"""A prefill worker whose blocks hold another number of tokens than those of the decode worker."""

from __future__ import annotations

from math import gcd
from typing import Any

import msgspec
import pytest

from pullfill.errors import BadMessage, HandoffError
from pullfill.prefill_worker.connector_scheduler import ConnectorScheduler
from pullfill.prefill_worker.context import PrefillContext
from pullfill.prefill_worker.task import PrefillTask
from pullfill.wire import FenceToken, Grant, KvMode, PrefillJob, u32
from tests.support.fakes import FakeManager, FakeRequest, FakeTransferWorker, step

GRANT = Grant(
    rid=1, job_id="j", attempt=1, incarnation="i", deadline_s=60, job_digest=b"",
    fence=FenceToken(slot=0, epoch=1),
)  # fmt: skip
OURS, THEIRS = 100, 500
"""The first block of the prompt here, and there. Each block is 7 after the one before."""


def blocks(base: int, tokens: int, size: int) -> list[int]:
    return [base + 7 * at for at in range(-(-tokens // size))]


class Pair:
    """One prompt between two workers. ours, theirs: tokens of a block."""

    def __init__(self, ours: int, theirs: int, tokens: int, hit: int = 0) -> None:
        self.ours, self.theirs, self.size = ours, theirs, gcd(ours, theirs)
        self.link = FakeTransferWorker()
        self.link.pieces = ours // self.size, theirs // self.size
        self.link.tokens = self.size
        self.job = PrefillJob(
            job_id="j", incarnation="i", decode_instance="d", request_id="r", compat="c",
            token_ids=u32.pack(range(tokens)), hit_tokens=hit,
            block_ids=u32.pack(blocks(THEIRS, tokens, theirs)), block_size=theirs, timeout_s=60.0,
        )  # fmt: skip
        self.ends: list[BaseException | None] = []
        self.task = self.made(self.job)
        context = PrefillContext("prefill-1", wake=lambda: None)
        context.tasks[self.task.request_id] = self.task
        self.side = ConnectorScheduler(context, ours)
        self.manager = FakeManager()
        self.manager.tables[self.task.request_id] = blocks(OURS, tokens, ours)
        self.side.bind_manager(self.manager)
        self.request = FakeRequest(self.task.request_id, self.task.token_ids)

    def made(self, job: PrefillJob, grant: Grant = GRANT) -> PrefillTask:
        return PrefillTask.of(job, u32.unpack(job.token_ids), grant, self.link, self.ends.append)

    def admit(self, local_hit: int = 0) -> int:
        external, _ = self.side.matched(self.request, local_hit)
        tables = self.manager.get_block_ids(self.task.request_id)
        self.side.allocated(self.request, tables, external)
        self.request.num_computed_tokens = local_hit + external
        return external

    def compute(self, chunk: int) -> None:
        left = len(self.task.token_ids) - self.request.num_computed_tokens
        while left:
            now = min(chunk, left)
            self.side.plan(step({self.task.request_id: now}))
            self.side.step_done()
            self.request.num_computed_tokens += now
            left -= now

    def moved(self, verb: str) -> list[tuple[int, int]]:
        """(first token here, first token there) of each piece that was moved, in order."""
        return [
            (self._token(here, OURS, self.ours), self._token(there, THEIRS, self.theirs))
            for what, local, remote in self.link.log
            for here, there in zip(local, remote, strict=True)
            if what == verb
        ]

    def _token(self, piece: int, base: int, size: int) -> int:
        pieces = size // self.size
        block, inside = divmod(piece, pieces)
        at, rest = divmod(block - base, 7)
        assert rest == 0, "a block of this prompt"
        return at * size + inside * self.size


SIZES = [(64, 32), (32, 64), (96, 64), (64, 96), (16, 48)]


@pytest.mark.parametrize(("ours", "theirs"), SIZES)
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 97, 200, 385])
@pytest.mark.parametrize("chunk", [7, 32, 64, 1000])
def test_every_piece_with_a_token_goes_out_once_in_order(
    ours: int, theirs: int, tokens: int, chunk: int
) -> None:
    pair = Pair(ours, theirs, tokens)
    assert pair.admit() == 0
    pair.compute(chunk)
    pair.link.flush()
    assert pair.moved("write") == [(at, at) for at in range(0, tokens, pair.size)]
    assert pair.ends == [None]
    assert pair.task.blocks_written == len(blocks(THEIRS, tokens, theirs)), "as there"


@pytest.mark.parametrize(("ours", "theirs"), SIZES)
@pytest.mark.parametrize("hit_blocks", [1, 2, 3])
@pytest.mark.parametrize("own_blocks", [0, 1, 2])
def test_a_hit_that_ends_inside_a_block_is_read_to_its_end(
    ours: int, theirs: int, hit_blocks: int, own_blocks: int
) -> None:
    tokens, hit, own = 400, hit_blocks * theirs, own_blocks * ours
    pair = Pair(ours, theirs, tokens, hit)
    assert pair.admit(own) == max(0, hit - own)
    pair.link.flush()
    assert pair.moved("read") == [(at, at) for at in range(own, hit, pair.size)]
    pair.compute(50)
    pair.link.flush()
    # What only this worker has is written, too.
    assert pair.moved("write") == [(at, at) for at in range(hit, tokens, pair.size)]
    assert pair.task.blocks_written == -(-tokens // theirs) - hit_blocks


def test_a_preempted_prompt_is_written_again_from_its_hit() -> None:
    pair = Pair(64, 96, 300, 96)
    pair.admit()
    pair.link.flush()
    pair.side.plan(step({pair.task.request_id: 100}))
    pair.side.step_done()
    pair.side.plan(step({}, [pair.task.request_id]))
    assert pair.task.written_blocks == 0
    pair.link.log.clear()
    pair.request.num_computed_tokens = 0
    pair.compute(150)
    pair.link.flush()
    assert pair.moved("write") == [(at, at) for at in range(96, 300, 32)]


def test_blocks_count_as_written_when_all_their_pieces_are() -> None:
    task = Pair(32, 96, 200).task  # 7 pieces in 3 blocks
    counts = []
    for task.written_blocks in range(8):
        counts.append(task.blocks_written)
    assert counts == [0, 0, 0, 1, 1, 1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "grant", "error"),
    [
        ({"block_size": 32, "block_ids": b"\0" * 28}, {}, BadMessage),
        ({}, {"mode": KvMode.PULL}, HandoffError),
    ],
)
def test_what_cannot_be_cut_is_refused(
    changes: dict[str, Any], grant: dict[str, Any], error: type[Exception]
) -> None:
    pair = Pair(32, 96, 200)
    with pytest.raises(error):
        pair.made(
            msgspec.structs.replace(pair.job, **changes), msgspec.structs.replace(GRANT, **grant)
        )
