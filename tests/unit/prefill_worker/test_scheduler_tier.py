"""The prefill connector's scheduler half beside vLLM's own KV offloading."""

from __future__ import annotations

from tests.unit.decode_worker.test_scheduler_tier import FakeTier
from tests.unit.prefill_worker.test_scheduler import BLOCK, LOCAL, Engine


def engine_with(found: int | None) -> tuple[Engine, FakeTier]:
    engine, tier = Engine(6 * BLOCK, hit=4 * BLOCK, local_hit=BLOCK), FakeTier(found)
    engine.side.tier = tier  # type: ignore[assignment]
    return engine, tier


def test_what_it_has_whole_is_not_read_from_the_decode_worker() -> None:
    engine, tier = engine_with(None)
    assert engine.side.matched(engine.request, BLOCK) == (None, False), "vLLM asks again"
    tier.found = 3 * BLOCK
    assert engine.side.matched(engine.request, BLOCK) == (0, False), "vLLM asks the tier next"


def test_a_read_begins_after_the_step_that_ends_copies_from_its_blocks() -> None:
    engine, tier = engine_with(2 * BLOCK)
    assert engine.admit() == 3 * BLOCK
    assert tier.claimed >= {LOCAL + 1, LOCAL + 2, LOCAL + 3}
    assert engine.transfer_worker.queue == []
    engine.run(0)
    (copy,) = engine.transfer_worker.queue
    assert (copy.read, copy.local) == (True, [LOCAL + 1, LOCAL + 2, LOCAL + 3])
    engine.run(0)
    assert len(engine.transfer_worker.queue) == 1
