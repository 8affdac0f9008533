"""An attempt that makes progress goes on beyond its deadline.

Real control channel, ledger, runner and transfer worker. The link copies one batch after another,
slowly.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from pullfill.wire import KvMode
from tests.support.handoff_rig import Cluster, DecodeHalf, Make, PrefillHalf, prompt, settled
from tests.support.kv_engine import BLOCK, LAYOUT

TIMEOUT_S = 0.8
"""`remote_timeout_s`. It is also the whole deadline, because the link is not measured yet."""
BLOCKS = 16
BATCH_S = 0.17
LONG = prompt(BLOCKS * BLOCK + 1)


def slow(cluster: Cluster, half: DecodeHalf | PrefillHalf) -> None:
    """Slow down the copies to or from `half` to one block per BATCH_S."""
    transport: Any = cluster.rig.transport
    connect = transport.connect

    def connect_for_small_batches(*arguments: object) -> Any:
        session = connect(*arguments)
        session._limits = (LAYOUT.block_bytes, 1000)
        return session

    transport.connect = connect_for_small_batches
    owner: Any = (half.region if isinstance(half, DecodeHalf) else half.local).owner
    owner.faults.inside_batch = lambda: time.sleep(BATCH_S)


@pytest.mark.parametrize(("mode", "chunk"), [(KvMode.PUSH_ASYNC, 1000), (KvMode.PULL, 7)])
@pytest.mark.essential
async def test_a_job_that_moves_is_never_timed_out_and_started_again(
    make: Make, mode: KvMode, chunk: int
) -> None:
    """One copy takes three times as long as the deadline."""
    async with make(timeout_s=TIMEOUT_S, kv_mode=mode) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=chunk)
        slow(cluster, prefill if mode is KvMode.PULL else decode)
        began = time.monotonic()
        served = decode.send(LONG)
        await settled(served)
        assert time.monotonic() - began > 3 * TIMEOUT_S, "or the deadline was never reached"
        assert decode.right(served)
        assert prefill.engine.computed_tokens == len(LONG) - 1, "computed once"
        await cluster.check_clean()
        assert (prefill.budget.completed, prefill.budget.failed) == (1, 0)
