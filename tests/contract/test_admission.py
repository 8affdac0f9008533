"""What prefill workers report reaches the router: real control channel, ledger and queue depth."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.decode_worker.cost import Queue
from pullfill.decode_worker.load import jobs_of
from pullfill.queue.streams import round_up_tokens
from pullfill.wire import Load
from tests.support import said
from tests.support.fakes import FakeRequest
from tests.support.handoff_rig import DecodeHalf, Make, PrefillHalf, prompt, settled
from tests.support.kv_engine import BLOCK
from tests.support.waiting import soon

TOKENS = 10 * BLOCK
"""Tokens of each prompt that a prefill worker must compute."""


async def reported(decode: DecodeHalf, prefill: PrefillHalf, load: Load) -> None:
    prefill.links.load = lambda: load
    prefill.links.pause("")  # says so at once
    await soon(lambda: [p.load for p in decode.control.peers.pulling] == [load])


def remote(decode: DecodeHalf, seed: int) -> bool:
    request = FakeRequest(f"asked-{seed}", prompt(TOKENS + 1, seed=seed))
    return decode.side.decide(request, 0)[1]


@pytest.mark.essential
async def test_a_burst_is_admitted_up_to_the_expected_wait(make: Make) -> None:
    async with make() as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=7)
        decode.look()
        prefill.puller.pause("check", "paused")
        served = [decode.send(prompt(TOKENS + 1, seed=n)) for n in range(4)]
        assert remote(decode, 4), "nobody has measured anything yet"
        # Each takes 4 s, so the next one would wait for 16 s.
        await reported(decode, prefill, Load(tokens_per_s=TOKENS / 4))
        assert not remote(decode, 5)
        decode.abort(served.pop())
        decode.abort(served.pop())
        await soon(lambda: decode.producer.depth().depth_jobs == 2)
        assert remote(decode, 6), "8 s"
        served.append(decode.send(prompt(TOKENS + 1, seed=7)))
        (last,) = [e for e in decode.ledger._jobs.values() if e.request_id == "r4"]
        assert last.claim_timeout_s == 16, "twice what it is expected to wait"
        assert last.deadline - last.opened_at > 20, "and more for the whole than the setting"
        assert not remote(decode, 8)
        await reported(decode, prefill, Load(tokens_per_s=TOKENS))
        assert remote(decode, 9), "3 s"
        prefill.puller.pause("check", "")
        await settled(*served)
        assert all(decode.right(s) for s in served)
        await cluster.check_clean()


@pytest.mark.essential
async def test_a_prompt_whose_job_nats_does_not_take_stays_and_takes_no_blocks(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """It took blocks, failed, and was a `queue_full` without a line in any log."""
    async with make() as cluster:
        decode, _ = await cluster.decode(), await cluster.prefill()
        decode.look(max_body=(8 << 10) + 5 * TOKENS)
        assert remote(decode, 1)
        for seed in (2, 3):
            request = FakeRequest(f"long-{seed}", prompt(2 * TOKENS, seed=seed))
            assert decode.side.decide(request, 0) == (0, False)
            reason = decode.side._decisions[request.request_id][1].reason
            assert reason == "job_too_large"
        (told,) = [r.getMessage() for r in caplog.records if "stays here" in r.getMessage()]
        assert "raise max_payload" in told


@pytest.mark.essential
async def test_prompts_too_long_for_some_prefill_workers_go_to_the_others(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """One with a smaller `--max-model-len` got and failed all of them, and nobody learned why."""
    async with make() as cluster:
        decode, small = await cluster.decode(), await cluster.prefill(longest=TOKENS)
        decode.look()
        assert remote(decode, 1)
        for seed in (2, 3):
            request = FakeRequest(f"long-{seed}", prompt(TOKENS + 2, seed=seed))
            assert decode.side.decide(request, 0) == (0, False)
            assert decode.side._decisions[request.request_id][1].reason == "prompt_too_long"
            assert decode.side._decisions[request.request_id][1].reason == "prompt_too_long"
        assert caplog.text.count("stays here, like all") == 1
        assert caplog.text.count("at most (its --max-model-len)") == 1
        large = await cluster.prefill()
        served = [decode.send(prompt(TOKENS + 2, seed=seed)) for seed in range(4, 12)]
        await settled(*served)
        assert all(request.loaded and decode.right(request) for request in served)
        await soon(lambda: large.budget.completed == len(served))  # a moment after the commit
        assert small.budget.failed == 0
        await cluster.check_clean()


async def test_what_is_computed_is_not_in_front_though_nothing_is_written(make: Make) -> None:
    """In pull mode nothing is ever written, and in the others it comes later."""
    async with make() as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=7)
        decode.look()
        prefill.puller.pause("check", "paused")
        served = decode.send(prompt(TOKENS + 1, seed=1))
        await soon(lambda: decode.producer.depth().depth_jobs == 1)
        (job,) = jobs_of(decode.ledger)
        await reported(decode, prefill, Load(tokens_per_s=TOKENS / 12))
        assert not remote(decode, 2), "12 s"
        (writer,) = decode.control.peers
        asked: list[Queue] = []
        meter: Any = SimpleNamespace(predict=lambda _, hit, queue, config: asked.append(queue))
        assert decode.outlook is not None
        decode.outlook.meter = meter
        grant = said.grant(decode.ledger, job.job_id, "i0", writer).grant
        assert grant is not None
        await reported(decode, prefill, Load(tokens_per_s=TOKENS / 12, done_tokens=TOKENS // 2))
        assert remote(decode, 3), "6 s"
        assert asked == [Queue(1, 1, round_up_tokens(TOKENS) - TOKENS // 2)]
        decode.outlook.draining.set()
        assert not remote(decode, 4), "it leaves"
        said.gave_up(decode.ledger, job.job_id, grant.attempt, "i0", writer, retry=False)
        await settled(served)
        prefill.puller.pause("check", "")
        await cluster.check_clean()


async def test_the_writing_of_each_commit_is_measured(make: Make) -> None:
    async with make() as cluster:
        decode, _ = await cluster.decode(), await cluster.prefill(chunk=7)
        decode.look()
        for seed in range(3):
            await settled(decode.send(prompt(TOKENS + 1, seed=seed)))
        loads = {"prefill-1": Load()}
        told = decode.links.forecast(1, 1, 1, loads=loads, depth_tokens=0, own_tokens=0)
        assert told.write_s > 0
        await cluster.check_clean()
