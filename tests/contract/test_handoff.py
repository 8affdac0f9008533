"""The whole handoff without vLLM: real queue, ledger, control channel, runner, transfer worker,
transport.

What counts is the decode worker's memory: after each remote prefill it holds, byte for byte, what
computing there would have left; and afterwards nothing is left anywhere.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pullfill.errors import Outcome
from pullfill.queue.contract import Urgency
from pullfill.wire import PrefillJob, decode, encode, u32
from tests.support.fakes import FakeClock
from tests.support.handoff_rig import Cluster, Make, hold, prompt, settled, stuck_in_a_write
from tests.support.kv_engine import BLOCK
from tests.support.nats import NatsServer
from tests.support.waiting import soon

# ------------------------------------------------------------------ right bytes


@settings(max_examples=40, deadline=None, database=None)
@given(st.data())
def test_any_mixture(nats: NatsServer, data: st.DataObject) -> None:
    """Random lengths, hits and chunks, two prefill workers, preemptions in between."""

    async def go(directory: Path) -> None:
        async with Cluster(directory, nats) as cluster:
            decode = await cluster.decode()
            prefills = [
                await cluster.prefill(chunk=data.draw(st.integers(1, 20))) for _ in range(2)
            ]
            shared = prompt(4 * BLOCK, seed=7)
            hit = decode.cache(shared)
            for prefill in prefills:
                prefill.engine.preempt_next = data.draw(st.booleans())
                if data.draw(st.booleans()):
                    prefill.engine.cache(shared[: 3 * BLOCK])
            served = []
            for seed in range(data.draw(st.integers(1, 5))):
                use = data.draw(st.integers(0, 4))
                rest = data.draw(st.integers(2, 24))
                tokens = shared[: use * BLOCK] + prompt(rest, seed=100 + seed)
                served.append(decode.send(tokens, hit[:use]))
            await settled(*served)
            assert all(decode.right(s) for s in served)
            await cluster.check_clean()

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(go(Path(directory)))


# ------------------------------------------------------------------ prefill workers that fail


async def test_a_worker_that_is_stopped_in_a_write_hands_its_job_on(make: Make) -> None:
    async with make(clock=FakeClock()) as cluster:
        decode, first = await cluster.decode(), await cluster.prefill(chunk=5)
        faults = hold(decode)
        served = decode.send(prompt(30))
        await stuck_in_a_write(decode)
        second = await cluster.prefill()
        await first.puller.stop()
        await first.puller.abandon()
        await soon(lambda: decode.ledger.quarantined_blocks == len(served.table))
        faults.resume()
        await settled(served)
        assert decode.right(served)
        await cluster.check_clean()
        assert (first.budget.completed, second.budget.completed) == (0, 1)


# ------------------------------------------------------------------ bad messages


class Tampered:
    """A producer whose published bodies are changed on the way."""

    def __init__(self, inner: Any, change: Callable[[bytes], bytes]) -> None:
        self._inner, self._change = inner, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def publish(self, job_id: str, body: bytes, tokens: int, urgency: Urgency) -> Any:
        return await self._inner.publish(job_id, self._change(body), tokens, urgency)


def forged(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda body: encode(msgspec.structs.replace(decode(body, PrefillJob), **changes))


def swapped_tokens(body: bytes) -> bytes:
    job = decode(body, PrefillJob)
    return forged(token_ids=bytes(reversed(job.token_ids)))(body)


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (lambda body: b"\xc1" * 40, Outcome.JOB_GONE),
        (lambda body: body[:-1], Outcome.JOB_GONE),
        (forged(token_ids=b""), Outcome.JOB_GONE),
        (forged(token_ids=b"abc"), Outcome.JOB_GONE),
        (forged(job_id="another"), Outcome.JOB_GONE),
        (swapped_tokens, Outcome.PREFILL_FAILED),
        (forged(token_ids=u32.pack(range(300))), Outcome.PREFILL_FAILED),
        (forged(block_ids=u32.pack([90, 91, 92])), Outcome.PREFILL_FAILED),
        (forged(hit_tokens=4), Outcome.PREFILL_FAILED),
    ],
    ids=[
        "noise", "cut", "no-tokens", "odd-tokens", "job-id", "tokens", "more-tokens",
        "blocks", "hit",
    ],
)  # fmt: skip
async def test_poison_and_forgery_write_nothing(
    make: Make, change: Callable[[bytes], bytes], outcome: Outcome
) -> None:
    """Dead-lettered, served locally, and not one byte of any block touched."""
    clean = True

    def maybe(body: bytes) -> bytes:
        return body if clean else change(body)

    async with make(wrap=lambda inner: Tampered(inner, maybe), clock=FakeClock()) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        clean = False
        served = decode.send(prompt(3 * BLOCK))
        before = decode.pages.copy()
        await settled(served)
        assert len(await soon(cluster.dead)) == 1
        assert served.loaded is False
        trace = decode.traces.finish(served.request.request_id)
        assert trace is not None
        assert trace.fallback == outcome.value
        assert (decode.pages == before).all()
        clean = True
        again = decode.send(prompt(9))
        await settled(again)
        assert decode.right(again), "the worker lives"
        await cluster.check_clean()
        assert prefill.budget.completed == 1


async def test_a_prompt_longer_than_the_worker_takes_is_local_and_no_poison(make: Make) -> None:
    async with make(max_deliver=2) as cluster:
        decode, _ = await cluster.decode(), await cluster.prefill(longest=300)
        served = decode.send(prompt(310))
        await settled(served)
        assert served.loaded is False
        await cluster.check_clean()
        assert not await cluster.dead()


# ------------------------------------------------------------------ decode workers that leave


async def test_a_draining_decode_worker_gets_what_was_granted(make: Make) -> None:
    """Its lease is revoked, so it leaves the directory at once; its requests go on."""
    async with make() as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=5)
        prefill.engine.gate.clear()
        served = decode.send(prompt(30))
        await soon(lambda: prefill.tasks)
        cluster.directory.remove("decode-1")
        late = decode.send(prompt(20))
        prefill.engine.gate.set()
        await settled(served, late)
        assert decode.right(served)
        assert decode.right(late)
        await cluster.check_clean()
        await decode.control.stop()
        await soon(lambda: not prefill.links.links)
