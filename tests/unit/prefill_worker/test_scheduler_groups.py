"""What the prefill connector reads and writes of a model with two KV cache groups."""

from __future__ import annotations

import pytest

from pullfill.engine.groups import EMPTY, BlockOrder
from pullfill.errors import HandoffError
from tests.unit.prefill_worker.test_scheduler import BLOCK, LOCAL, REMOTE, Engine

WINDOW = 2
"""Blocks that the second group keeps."""


def with_window(engine: Engine, read_from: int) -> Engine:
    """Give the engine a second group. Its block i is 100 more than that of the first group, here
    and there. read_from: where the decode worker's blocks of the hit begin in that group."""

    def kept_from(tokens: int) -> tuple[int, int]:
        return 0, max(0, tokens // BLOCK - WINDOW)

    def blocks(base: int, order: BlockOrder, start: int, stop: int) -> list[int]:
        tables = [[base + group + at for at in range(stop)] for group in (0, 100)]
        return order.ids(tables, start, stop)

    task, hit = engine.task, engine.task.job.hit_tokens // BLOCK
    engine.side.bind(engine.manager, kept_from)
    task.readable = BlockOrder((0, read_from))
    task.written = BlockOrder(kept_from(len(task.token_ids)))
    task.remote_blocks = [
        *blocks(REMOTE, task.readable, 0, hit),
        *blocks(REMOTE, task.written, hit, engine.total),
    ]
    engine.manager.windows["j.1"] = [LOCAL + 100 + at for at in range(engine.total)]
    return engine


@pytest.mark.parametrize(("local_hit", "read"), [(0, 0), (1, 0), (2, 1)])
def test_a_hit_without_a_part_of_the_window_is_computed_here(local_hit: int, read: int) -> None:
    """Unless this engine has that part itself."""
    engine = with_window(Engine(6 * BLOCK, hit=3 * BLOCK, local_hit=local_hit * BLOCK), read_from=2)
    assert engine.admit() == read * BLOCK


def test_a_block_that_the_window_has_left_behind_here_is_never_written() -> None:
    engine = with_window(Engine(6 * BLOCK), read_from=0)
    engine.admit()
    engine.manager.windows["j.1"][4] = EMPTY
    plan = engine.run(6 * BLOCK)
    assert plan.writes == []
    (failure,) = engine.ends
    assert isinstance(failure, HandoffError)


def test_a_state_in_one_block_is_written_after_the_last_token() -> None:
    """Without a prefix cache vLLM has one block for it, whatever the position."""
    engine = with_window(Engine(5 * BLOCK + 1), read_from=0)
    engine.side.bind(
        engine.manager,
        lambda tokens: (0, (tokens - 1) // BLOCK),
        lambda tables: [tables[0], [*tables[1]] * 6],
    )
    engine.manager.windows["j.1"] = [LOCAL + 100]
    engine.task.written = BlockOrder((0, 5))
    engine.task.remote_blocks = [*range(REMOTE, REMOTE + 6), REMOTE + 100]
    assert engine.admit() == 0
    engine.run(3 * BLOCK)
    engine.transfer_worker.flush()
    assert engine.written == [0, 1, 2]
    engine.run(2 * BLOCK + 1)
    engine.transfer_worker.flush()
    assert engine.written == [0, 1, 2, 3, 4, 5, 100]
    assert engine.ends == [None]
