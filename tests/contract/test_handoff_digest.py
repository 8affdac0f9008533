"""The handoff with digests: every byte compared on both ends, mismatches recomputed (row 24)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from pullfill.prefill_worker.jobs import JobRunner
from pullfill.runtime import failpoints, metrics
from pullfill.wire import DigestMode, ExplainRecord
from tests.support.handoff_decode import DecodeHalf, Served
from tests.support.handoff_rig import Cluster, hold, prompt, settled, stuck_in_a_write, until
from tests.support.kv_engine import BLOCK

FULL, SAMPLE, OFF = DigestMode.FULL, DigestMode.SAMPLE, DigestMode.OFF


def trace(decode: DecodeHalf, served: Served) -> ExplainRecord:
    record = decode.traces.finish(served.request.request_id)
    assert record is not None
    return record


def corrupt(decode: DecodeHalf, batches: int = 1) -> None:
    owner: Any = decode.region.owner
    owner.faults.corrupt(batches)


def counted(result: str) -> float:
    value: float = metrics.KV_DIGEST.labels(result)._value.get()
    return value


@pytest.mark.parametrize("transport", ["loopback", "shm"])
@pytest.mark.parametrize("mode", [OFF, SAMPLE, FULL])
async def test_equal_digests_whatever_the_lengths_and_chunks(
    tmp_path: Path, transport: str, mode: DigestMode
) -> None:
    matches, mismatches = counted("match"), counted("mismatch")
    async with Cluster(tmp_path, transport, kv_digest=mode) as cluster:
        decode = await cluster.decode()
        await cluster.prefill(chunk=7)
        await cluster.prefill(chunk=3)
        lengths = [2, 4, 5, 6, 9, 16, 17, 18, 33, 61, 120]
        served = [decode.send(prompt(n, seed=n)) for n in lengths]
        await settled(*served)
        assert all(decode.right(s) for s in served)
        await cluster.check_clean()
    assert counted("match") - matches == (0 if mode is OFF else len(lengths))
    assert counted("mismatch") == mismatches


@pytest.mark.parametrize("decode_hit", [0, 1, 3])
@pytest.mark.parametrize("prefill_hit", [0, 3, 5])
async def test_row_23_equal_digests_with_hits_on_either_side(
    tmp_path: Path, decode_hit: int, prefill_hit: int
) -> None:
    tokens = prompt(6 * BLOCK + 2)
    async with Cluster(tmp_path, "shm", kv_digest=FULL) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=5)
        if prefill_hit:
            prefill.engine.cache(tokens[: prefill_hit * BLOCK])
        served = decode.send(tokens, decode.cache(tokens[: decode_hit * BLOCK]))
        await settled(served)
        assert decode.right(served)
        await cluster.check_clean()


async def test_a_block_written_again_after_a_preemption_has_its_new_digest(tmp_path: Path) -> None:
    async with Cluster(tmp_path, kv_digest=FULL) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=5)
        prefill.engine.preempt_next = True
        served = decode.send(prompt(30))
        await settled(served)
        assert decode.right(served)
        assert prefill.engine.computed_tokens > 29
        await cluster.check_clean()


async def test_a_corrupted_byte_is_recomputed_here_and_counted_once(tmp_path: Path) -> None:
    mismatches = counted("mismatch")
    async with Cluster(tmp_path, kv_digest=FULL) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=9)
        corrupt(decode)
        served = decode.send(prompt(40))
        await settled(served)
        assert served.loaded is False
        told = trace(decode, served)
        assert (told.path, told.fallback, told.attempts) == ("local", "digest_mismatch", 1)
        assert counted("mismatch") == mismatches + 1
        again = decode.send(prompt(40, seed=2))
        await settled(again)
        assert decode.right(again)
        await cluster.check_clean()
        assert (prefill.runner.completed, prefill.runner.failed) == (1, 1)
        assert not cluster.queue.dead


async def test_the_failpoint_changes_one_byte_and_off_does_not_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is what the option is for."""
    monkeypatch.setattr(failpoints, "_active", failpoints.parse("shm.write.corrupt=corrupt@2"))
    async with Cluster(tmp_path, "shm") as cluster:
        decode, _ = await cluster.decode(), await cluster.prefill(chunk=8)
        whole = prompt(10 * BLOCK + 1)
        served = decode.send(whole)
        await settled(served)
        assert served.loaded
        assert not decode.right(served)
        again = decode.send(whole)
        await settled(again)
        assert decode.right(again)
        assert (decode.pages[:, served.table] != decode.pages[:, again.table]).sum() == 1
        await cluster.check_clean()


async def test_a_sample_checks_the_last_block_and_few_others(tmp_path: Path) -> None:
    """The last batch is the last block alone here, and that is always in the sample."""
    async with Cluster(tmp_path, kv_digest=SAMPLE) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=BLOCK)
        faults = hold(decode, after=20)
        served = decode.send(prompt(20 * BLOCK + 2))
        await stuck_in_a_write(decode)
        (task,) = prefill.tasks
        assert task.written_blocks == 20
        assert served.table[-1] in task.checked
        assert len(task.checked) <= 8
        faults.corrupt()
        faults.resume()
        await settled(served)
        assert served.loaded is False
        await cluster.check_clean()


class SlowCheck:
    """The decode worker's checks stop until `go`."""

    def __init__(self, decode: DecodeHalf) -> None:
        verifier: Any = decode.control._verifier
        (digester,) = verifier._made(1)
        self._real = digester.digest
        self.entered, self.go = threading.Event(), threading.Event()
        digester.digest = self._digest

    def _digest(self, ids: Any) -> bytes:
        self.entered.set()
        assert self.go.wait(10)
        made: bytes = self._real(ids)
        return made


@pytest.mark.parametrize("end", ["abort", "incarnation", "prefill_dies", "duplicate"])
async def test_what_happens_while_a_commit_is_checked(
    tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Cluster(tmp_path, kv_digest=FULL, ack_wait_s=0.2) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        check = SlowCheck(decode)
        served = decode.send(prompt(30))
        await until(check.entered.is_set)
        assert decode.ledger.counts()["verifying"] == 1  # type: ignore[index]
        assert served.loaded is None, "not used before it is checked"
        if end == "abort":
            decode.abort(served)
            await settled(served)
            taken = decode.pool.allocate(len(served.table))
            assert taken is not None, "its blocks are free at once"
            decode.pages[:, taken] = 0x55
            decode.pool.release(taken)
        elif end == "incarnation":
            decode.ledger.new_incarnation("decode-1-i1")
            await settled(served)
        elif end == "prefill_dies":
            await prefill.puller.stop()
            await prefill.runner.abandon()
            await prefill.links.close()
            await until(lambda: decode.control.prefill_workers == 0)
        else:  # the message is delivered again, to somebody else, while it is checked
            await prefill.puller.stop()
            started, start = [], JobRunner.start
            monkeypatch.setattr(
                JobRunner, "start", lambda *args: (started.append(args), start(*args))
            )
            second = await cluster.prefill()
            await until(lambda: started)  # it may be over before anybody looks: it is refused
            assert second.engine.computed_tokens == 0
        check.go.set()
        await settled(served)
        assert served.loaded == (end in ("prefill_dies", "duplicate"))
        assert decode.right(served) == served.loaded
        if end == "prefill_dies":
            await cluster.prefill()
        await until(lambda: cluster.queue.status().depth_jobs == 0)
        await cluster.check_clean()


async def test_a_commit_without_its_digest_is_a_mismatch(tmp_path: Path) -> None:
    async with Cluster(tmp_path, kv_digest=FULL) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        prefill.engine.gate.clear()
        served = decode.send(prompt(30))
        await until(lambda: prefill.tasks)
        (task,) = prefill.tasks
        task.checked = frozenset()
        prefill.engine.gate.set()
        await settled(served)
        assert served.loaded is False
        assert trace(decode, served).fallback == "digest_mismatch"
        await cluster.check_clean()


async def test_many_at_once_one_corrupted(tmp_path: Path) -> None:
    async with Cluster(tmp_path, kv_digest=FULL) as cluster:
        decode = await cluster.decode()
        for _ in range(2):
            await cluster.prefill(chunk=5)
        corrupt(decode)
        served = [decode.send(prompt(20, seed=n)) for n in range(12)]
        await settled(*served)
        assert sorted(s.loaded for s in served if s.loaded is not None) == [False] + [True] * 11
        assert all(decode.right(s) for s in served if s.loaded)
        await cluster.check_clean()
