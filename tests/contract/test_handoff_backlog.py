"""The queue holds jobs of a decode worker that is gone, before jobs of one that is alive.

Two prefill workers without vLLM, otherwise real, on a real NATS server. Jobs of the dead decode
worker must not delay those of the live one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pullfill.prefill_worker.puller import MAX_WAITING, Budget
from pullfill.wire import PrefillJob, encode, u32
from tests.support.handoff_decode import COMPATIBLE
from tests.support.handoff_rig import Cluster, hold, prompt, settled, until
from tests.support.nats import NatsServer

CLAIM_S, SILENT_CLAIM_S = 0.05, 0.5
JOBS, TOKENS = 30, 1024
"""Each job alone fills the budget of a prefill worker here. It waits in the line of the live one's
short prompts (queue/contract.py), which therefore do not pass it."""
GONE = "decode-gone"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    server = NatsServer(tmp_path / "nats")
    await server.start()
    async with Cluster(tmp_path, server=server) as cluster:
        yield cluster
    server.stop()


async def publish_backlog(cluster: Cluster, jobs: int = JOBS) -> None:
    for number in range(jobs):
        job = PrefillJob(
            job_id=f"gone-{number}", incarnation="i", decode_instance=GONE,
            request_id="r", compat=COMPATIBLE.hash(),
            token_ids=u32.pack([1, 2, 3]), hit_tokens=0, block_ids=u32.pack([1]), timeout_s=1.0,
        )  # fmt: skip
        await cluster.decodes["decode-1"].producer.publish(job.job_id, encode(job), TOKENS)


@pytest.mark.parametrize("how", ["left", "never_known", "dead"])
async def test_the_backlog_of_a_decode_worker_that_is_gone_costs_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """left: its key was removed. never_known: that was before these prefill workers started. dead:
    its key still exists, but its control port refuses connections."""
    held = set[str]()
    pulled = Budget.pulled

    def note_slow(self: Budget, job_id: str, tokens: int) -> None:
        def look() -> None:
            charge = self._charges.get(job_id)
            if charge is not None and charge.counted and not charge.granted:
                held.add(job_id)

        asyncio.get_running_loop().call_later(0.9 * CLAIM_S, look)
        pulled(self, job_id, tokens)

    monkeypatch.setattr(Budget, "pulled", note_slow)
    live = await cluster.decode()
    prefills = [await cluster.prefill(pull=False) for _ in range(2)]
    if how != "never_known":
        record = cluster.directory.members[live.name]
        nowhere = msgspec.structs.replace(
            record, instance_id=GONE, control="tcp://127.0.0.1:1", incarnation="i"
        )
        cluster.directory.put(nowhere)
    if how == "left":
        cluster.directory.remove(GONE)
    for prefill in prefills:
        prefill.puller.start()

    async def answer() -> None:
        served = [live.send(prompt(30, seed=n)) for n in range(2)]
        await settled(*served)
        assert all(live.right(request) for request in served)

    await answer()
    await publish_backlog(cluster)
    await answer()
    # A stall of this process may let one for each worker hold its budget for CLAIM_S.
    assert sum(job_id.startswith("gone-") for job_id in held) < JOBS / 3
    if how == "dead":
        cluster.directory.remove(GONE)
    await cluster.check_clean()
    assert sum(prefill.budget.completed for prefill in prefills) == 4


async def test_no_worker_takes_two_prompts_of_a_burst_while_its_first_claim_is_under_way(
    cluster: Cluster,
) -> None:
    """Each prompt fills the budget. If only grants counted, each worker would take two."""
    cluster.budget["claim_s"] = 10.0  # a busy machine answers claims late
    decode = await cluster.decode()
    prefills = [await cluster.prefill(pull=False) for _ in range(2)]
    faults = hold(decode)
    served = [decode.send(prompt(80, seed=n)) for n in range(4)]
    for prefill in prefills:
        prefill.budget.limit = 70
        prefill.puller.start()
    await until(lambda: all(prefill.tasks for prefill in prefills))
    await asyncio.sleep(0.3)
    assert [prefill.puller.in_flight for prefill in prefills] == [1, 1]
    faults.resume()
    await settled(*served)
    assert all(decode.right(request) for request in served)
    await cluster.check_clean()


async def test_deliveries_that_wait_are_bounded_by_their_number(cluster: Cluster) -> None:
    """A decode worker answers no claim. Its jobs use no budget, but no worker pulls all of them."""
    live = await cluster.decode()
    prefills = [await cluster.prefill(pull=False) for _ in range(2)]
    answer = asyncio.Event()
    for prefill in prefills:
        find = prefill.links.find

        async def late(instance_id: str, find: Any = find) -> Any:
            if instance_id == GONE:
                await answer.wait()
            return await find(instance_id)

        prefill.links.find = late  # type: ignore[method-assign]
        prefill.puller.start()
    await publish_backlog(cluster, 2 * MAX_WAITING + 10)
    await until(lambda: all(p.budget.waiting == MAX_WAITING for p in prefills), 30)
    await until(lambda: not any(p.budget.tokens for p in prefills))
    await asyncio.sleep(0.1)
    assert [p.budget.waiting for p in prefills] == [MAX_WAITING] * 2
    answer.set()
    served = live.send(prompt(30))
    await settled(served)
    assert live.right(served)
    await cluster.check_clean()
