"""The handoff against bad messages, decode workers that leave, and a queue that is away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pullfill.errors import Outcome
from pullfill.queue.contract import Urgency
from pullfill.wire import WIRE_VERSION, PrefillJob, decode, encode, u32
from tests.support.fakes import FakeClock
from tests.support.handoff_rig import Cluster, hold, prompt, settled, stuck_in_a_write, until
from tests.support.kv_engine import BLOCK

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
    tmp_path: Path, change: Callable[[bytes], bytes], outcome: Outcome
) -> None:
    """Dead-lettered, served locally, and not one byte of any block touched."""
    clean = True

    def maybe(body: bytes) -> bytes:
        return body if clean else change(body)

    async with Cluster(
        tmp_path, wrap=lambda inner: Tampered(inner, maybe), clock=FakeClock()
    ) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        clean = False
        served = decode.send(prompt(3 * BLOCK))
        before = decode.pages.copy()
        await until(lambda: len(cluster.queue.dead) == 1)
        await settled(served)
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


async def test_a_job_of_another_wire_version_is_left_to_a_worker_that_can_read_it(
    tmp_path: Path,
) -> None:
    newer = forged(v=WIRE_VERSION + 1)
    async with Cluster(tmp_path, wrap=lambda inner: Tampered(inner, newer)) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        served = decode.send(prompt(20))
        job = cluster.queue.job
        await until(lambda: (one := job(1)) is not None and one.deliveries and not one.in_flight)
        await prefill.puller.stop()
        delivery = await cluster.queue.consumer().pull(30.0)
        assert delivery.number == 2
        assert not cluster.queue.dead
        await delivery.ack()
        await settled(served)
        await cluster.check_clean()


async def test_a_prompt_longer_than_the_worker_takes_is_local_and_no_poison(tmp_path: Path) -> None:
    async with Cluster(tmp_path, max_deliver=2) as cluster:
        decode, _ = await cluster.decode(), await cluster.prefill(longest=300)
        served = decode.send(prompt(310))
        await settled(served)
        assert served.loaded is False
        await cluster.check_clean()
        assert not cluster.queue.dead


# ------------------------------------------------------------------ decode workers that leave


async def test_jobs_of_a_decode_worker_that_is_gone_are_dropped(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        gone, stays = await cluster.decode("decode-1"), await cluster.decode("decode-2")
        prefill = await cluster.prefill(pull=False)
        lost = gone.send(prompt(20))
        served = stays.send(prompt(20))
        await until(lambda: cluster.queue.status().depth_jobs == 2)
        cluster.directory.remove("decode-1")
        await gone.control.stop()
        prefill.puller.start()
        await settled(served)
        await until(lambda: cluster.queue.status().depth_jobs == 0)
        assert prefill.engine.computed_tokens == 19
        assert not cluster.queue.dead
        gone.abort(lost)
        gone.ledger.give_up_all(Outcome.ENGINE_STUCK)
        await cluster.check_clean()


async def test_a_decode_worker_leaves_while_its_prompt_is_computed(tmp_path: Path) -> None:
    """The step's writes come after the transfer worker was closed; the engine gets its blocks
    back."""
    async with Cluster(tmp_path) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=5)
        prefill.engine.gate.clear()
        served = decode.send(prompt(30))
        await until(lambda: prefill.tasks)
        cluster.directory.remove("decode-1")
        await decode.control.stop()
        await until(lambda: not prefill.links.connected)
        await settled(served)
        assert served.loaded is False
        prefill.engine.gate.set()
        await until(lambda: cluster.queue.status().depth_jobs == 0)
        await cluster.check_clean()


async def test_a_draining_decode_worker_gets_what_was_granted(tmp_path: Path) -> None:
    """Its lease is revoked, so it leaves the directory at once; its requests go on."""
    async with Cluster(tmp_path) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=5)
        prefill.engine.gate.clear()
        served = decode.send(prompt(30))
        await until(lambda: prefill.tasks)
        cluster.directory.remove("decode-1")
        late = decode.send(prompt(20))
        prefill.engine.gate.set()
        await settled(served, late)
        assert decode.right(served)
        assert decode.right(late)
        await cluster.check_clean()
        await decode.control.stop()
        await until(lambda: not prefill.links.links)


async def test_a_draining_prefill_worker_is_waited_for_only_with_what_it_was_granted(
    tmp_path: Path,
) -> None:
    async with Cluster(tmp_path) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=5)
        prefill.engine.gate.clear()
        granted = decode.send(prompt(30))
        await until(lambda: prefill.tasks)
        await prefill.puller.stop()
        queued = decode.send(prompt(20))
        prefill.links.leave()
        await settled(queued)
        assert queued.loaded is False
        assert granted.loaded is None
        assert len(decode.control.peers.pulling) == 0
        prefill.engine.gate.set()
        await settled(granted)
        assert decode.right(granted)
        await cluster.check_clean()


async def test_a_decode_worker_that_comes_back_to_the_directory_stays(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        record = cluster.directory.members["decode-1"]
        cluster.directory.remove("decode-1")
        cluster.directory.put(record)
        for peer in list(decode.control.peers.values()):
            peer.channel.close()
        await until(lambda: len(decode.control.peers.pulling) == 0)
        await until(lambda: prefill.links.connected and len(decode.control.peers.pulling))
        served = decode.send(prompt(20))
        await settled(served)
        assert decode.right(served)
        await cluster.check_clean()


async def test_a_new_incarnation_voids_what_was_granted(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=5)
        faults = hold(decode)
        served = decode.send(prompt(30))
        await stuck_in_a_write(decode)
        decode.ledger.new_incarnation("decode-1-i1")
        decode.region.owner.renew("decode-1-i1")
        decode.region.descriptor = msgspec.structs.replace(
            decode.region.descriptor, incarnation="decode-1-i1"
        )
        record = cluster.directory.members["decode-1"]
        cluster.directory.put(msgspec.structs.replace(record, incarnation="decode-1-i1"))
        await settled(served)
        assert served.loaded is False
        faults.resume()
        await until(lambda: prefill.links.connected)
        again = decode.send(prompt(30))
        await settled(again)
        assert decode.right(again)
        await cluster.check_clean()


async def test_the_queue_going_away_means_local_at_once(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        decode, _ = await cluster.decode(), await cluster.prefill()
        cluster.queue.offline = True
        served = decode.send(prompt(20))
        await settled(served)
        assert served.loaded is False
        cluster.queue.offline = False
        again = decode.send(prompt(20))
        await settled(again)
        assert decode.right(again)
        await cluster.check_clean()


async def test_a_paused_puller_gives_back_what_a_pull_still_brings(tmp_path: Path) -> None:
    """Its engine is stuck. The job goes to a worker that pulls, or to this one when it goes on."""
    async with Cluster(tmp_path) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        await asyncio.sleep(0.05)  # the pull under way began before the pause
        prefill.puller.pause("check", "paused")
        served = decode.send(prompt(20))
        await asyncio.sleep(0.3)
        assert served.loaded is None
        assert prefill.puller.in_flight == 0
        assert cluster.queue.status().depth_jobs == 1
        prefill.puller.pause("check", "")
        await settled(served)
        assert decode.right(served)
        await cluster.check_clean()
