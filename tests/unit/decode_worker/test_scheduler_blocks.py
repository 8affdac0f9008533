"""Which blocks a job lists of a model with two KV cache groups, and which are held for it."""

from __future__ import annotations

import pytest

from tests.support.fakes import FakeRequest
from tests.support.handoff_model import BLOCK
from tests.unit.decode_worker.test_scheduler import Rig


def test_a_job_names_no_block_that_a_window_has_left_behind() -> None:
    """Two groups: one keeps all blocks, the other the last two that are full, and what follows."""
    rig = Rig()
    rig.blocks.kept_from = lambda tokens: (0, max(0, tokens // BLOCK - 2))
    request = FakeRequest("r", list(range(6 * BLOCK + 2)))
    external, _ = rig.side.decide(request, 0)
    rig.side.enqueue(request, [list(range(11, 18)), [0, 0, 0, 0, 25, 26, 27]], external)
    (job,) = rig.published
    assert (job.read_from, job.kept_from) == ((0, 0), (0, 4))
    assert job.blocks == (11, 12, 13, 14, 15, 25, 16, 26, 17, 27)
    assert rig.blocks.longest_kept(8 * BLOCK) == 2 * BLOCK
    assert rig.blocks.targets(request.num_prompt_tokens, 0) == len(job.blocks)
    assert rig.ledger.sums().uncomputed == 6 * BLOCK + 1, "however many blocks each token has"


@pytest.mark.parametrize("hashes", [1, 2], ids=["one hash", "--prefix-match-unit"])
@pytest.mark.parametrize("cached", [True, False])
def test_what_a_window_sees_at_the_end_of_the_hit_is_held_for_the_job(
    cached: bool, hashes: int
) -> None:
    """The request needs the window at the end of the prompt, the prefill worker that at the end of
    the hit. What was evicted from there cannot be read.

    hashes: number of hashes of each block."""
    rig = Rig()
    rig.pool.hash_block_size = BLOCK // hashes
    rig.blocks.kept_from = lambda tokens: (0, max(0, tokens // BLOCK - 2))
    request = FakeRequest("r", list(range(6 * BLOCK + 2)))
    names = [f"h{at}" for at in range(6)]
    request.block_hashes = [part for name in names for part in [f"{name}-"] * (hashes - 1) + [name]]
    known = {"h1": 31, "h2": 32} if cached else {"h1": 31}
    rig.pool.cached = {(name, 1): block for name, block in known.items()}
    external, _ = rig.side.decide(request, 3 * BLOCK)
    rig.side.enqueue(request, [list(range(11, 18)), [0, 0, 0, 0, 25, 26, 27]], external)
    rig.side.step_done()
    (job,) = rig.published
    targets = (14, 15, 25, 16, 26, 17, 27)
    entry = rig.ledger.find(job.job_id)
    assert entry is not None
    assert job.kept_from == (0, 4)
    assert rig.blocks.targets(request.num_prompt_tokens, 3 * BLOCK) == len(targets)
    if not cached:
        assert (job.read_from, job.blocks) == ((0, 3), (11, 12, 13, *targets))
        assert entry.first_target == 3
        assert rig.pool.refs(31) == 0
        return
    assert (job.read_from, job.blocks) == ((0, 1), (11, 12, 31, 13, 32, *targets))
    assert entry.first_target == 5
    assert (rig.pool.refs(31), rig.pool.refs(32)) == (1, 1)
    rig.side.request_finished("r")
    rig.side.collect()
    assert (rig.pool.refs(31), rig.pool.refs(32)) == (0, 0)
