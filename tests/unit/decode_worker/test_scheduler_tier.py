"""The decode connector's scheduler half beside vLLM's own KV offloading."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.errors import Outcome
from tests.support.fakes import FakeRequest
from tests.support.handoff_model import BLOCK
from tests.unit.decode_worker.test_scheduler import Rig

PROMPT = 10 * BLOCK


class FakeTier:
    """Has `found` tokens beyond every prefix hit."""

    def __init__(self, found: int | None) -> None:
        self.found = found
        self.loads: list[tuple[str, int]] = []
        self.claimed: set[int] = set()

    def hit(self, request: Any, hit_tokens: int) -> int | None:
        return self.found

    def load(self, request: Any, tokens: int) -> None:
        self.loads.append((request.request_id, tokens))

    def claim(self, block_ids: Iterable[int]) -> None:
        self.claimed.update(block_ids)


def rig_with(found: int | None) -> tuple[Rig, FakeTier]:
    tier = FakeTier(found)
    return Rig(tier=tier), tier


def received(*request_ids: str) -> SimpleNamespace:
    """What a step tells vLLM: the tier has loaded these."""
    return SimpleNamespace(finished_recving=set(request_ids))


def test_its_hit_counts_as_the_local_hit() -> None:
    rig, tier = rig_with(8 * BLOCK)
    rig.config = type(rig.config)(max_local_prefill_length=2 * BLOCK)
    request = FakeRequest("r", list(range(PROMPT)))
    assert rig.side.decide(request, 0) == (0, False), "vLLM asks the tier next"
    rig.side.enqueue(request, [list(range(10))], 0)
    assert rig.traces.offloaded("r") == 8 * BLOCK
    record = rig.traces.finish("r")
    assert record is not None
    assert (record.reason, record.prefix_hit_tokens) == ("prefix_hit", 8 * BLOCK)
    assert record.offloaded_tokens == 8 * BLOCK
    assert tier.loads == [], "loaded by vLLM"


def test_vllm_asks_again_while_the_tier_does_not_know() -> None:
    rig, tier = rig_with(None)
    request = FakeRequest("r", list(range(PROMPT)))
    assert rig.side.decide(request, 0) == (None, False)
    tier.found = 0
    assert rig.side.decide(request, 0) == (PROMPT - 1, True)


def test_without_a_hit_of_it_a_job_waits_for_the_step_that_ends_its_copies() -> None:
    """It may copy from blocks of requests that have ended, in the step that allocates them."""
    rig, tier = rig_with(0)
    rig.send(PROMPT, hit=2 * BLOCK)
    assert rig.published == []
    rig.side.collect()
    assert rig.published == []
    rig.side.step_done()
    (job,) = rig.published
    assert tier.claimed == set(job.blocks[2:]), "not the hit, which others use"


def test_a_prefill_worker_gets_the_rest_once_the_hit_is_loaded() -> None:
    rig, tier = rig_with(3 * BLOCK)
    stats = SimpleNamespace(num_cached_tokens=PROMPT - 1)  # as vLLM counts what is not computed
    request = FakeRequest("r", list(range(100, 100 + PROMPT)), prefill_stats=stats)
    assert rig.side.decide(request, BLOCK) == (PROMPT - 1 - BLOCK, True)
    blocks = rig.pool.allocate(10)
    assert blocks is not None
    rig.side.enqueue(request, [blocks], PROMPT - 1 - BLOCK)
    assert stats.num_cached_tokens == BLOCK + 3 * BLOCK, "its own hit, and the tier's"
    assert tier.loads == [("r", 3 * BLOCK)]
    rig.side.collect()
    rig.side.step_done()
    rig.clock.advance(2 * rig.config.claim_timeout_s)
    rig.ledger.tick()
    assert rig.published == [], "the hit is not there yet"

    output = received("r", "other")
    rig.side.tier_loaded(output)
    assert output.finished_recving == {"other"}, "vLLM would run it without the rest"
    (job,) = rig.published
    assert (job.hit_tokens, len(job.token_ids)) == (4 * BLOCK, PROMPT - 1)
    assert job.blocks == tuple(blocks)
    entry = rig.ledger.find(job.job_id)
    assert entry is not None
    assert (entry.first_target, entry.tokens) == (4, PROMPT - 1 - 4 * BLOCK)
    rig.side.tier_loaded(received("r"))
    assert len(rig.published) == 1


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_job_that_ends_while_the_hit_is_loaded_is_reported_after_the_load(
    cancelled: bool,
) -> None:
    """vLLM frees the blocks when it hears of the end, and the tier still writes into them."""
    rig, _ = rig_with(3 * BLOCK)
    rig.send(PROMPT)
    if cancelled:
        rig.side.request_finished("r")
    else:
        rig.ledger.give_up_all(Outcome.PREFILL_LOST)
    for _ in range(2):
        assert rig.side.collect() == ([], [])
        rig.side.step_done()
    rig.side.tier_loaded(received("r"))
    assert rig.side.has_work
    assert rig.side.collect() == ([], ["r"])
    assert not rig.side.has_work
    assert rig.published == []
