"""Between commit and use: the ledger while digests are compared, and what compares them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pullfill.decode_worker.ledger_types import CancelMessage, JobState, Settle, Verify
from pullfill.decode_worker.verify import SUSPECT, Verifier, verifier_for
from pullfill.engine.groups import ONE_TABLE, BlockOrder
from pullfill.errors import Outcome
from pullfill.runtime import metrics
from pullfill.transfer.digest import DIGEST_BYTES, BlockDigester, sampled
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.pieces import cut_memory
from pullfill.wire import DigestMode, RefuseReason
from tests.support.handoff_model import NUM_BLOCKS, TIMEOUT_S, Grant, HandoffModel, Job
from tests.support.transfer_rigs import extent, memory_over, random_bytes

# ------------------------------------------------------------------ the ledger


def committed(model: HandoffModel) -> tuple[Job, Grant, Verify]:
    """A job whose bytes are to be checked."""
    model.ledger.kv_digest = DigestMode.FULL
    job = model.open(2, 1)
    assert job is not None
    model.publish(job)
    grant = model.claim(job, "a").grant
    assert grant is not None
    assert grant.kv_digest is DigestMode.FULL
    assert model.commit(model.grants[-1]) == "verify"
    entry = model.ledger.find(job.job.job_id)
    assert entry is not None
    assert entry.state is JobState.VERIFYING
    assert model.fences.in_use == 0, "the writer is proved quiet first"
    assert not model.ledger.has_events, "vLLM hears nothing before the verdict"
    return job, model.grants[-1], model.verifying[-1]


def outcome(model: HandoffModel) -> Outcome:
    ((_, found),) = model.outcomes
    return found


def test_a_good_verdict_loads() -> None:
    model = HandoffModel()
    job, _, verify = committed(model)
    assert model.verdict(verify, good=True) is None
    assert list(model.ledger._events) == [Settle(job.request.request_id, True, Outcome.COMMITTED)]
    assert model.claim(job, "b").refused is RefuseReason.COMMITTED
    model.drain()


def test_a_bad_verdict_recomputes_here_and_deletes_the_message() -> None:
    model = HandoffModel()
    job, _, verify = committed(model)
    assert model.verdict(verify, good=False) == "digest_mismatch"
    assert list(model.ledger._events) == [
        Settle(job.request.request_id, False, Outcome.DIGEST_MISMATCH)
    ]
    assert job.cancelled_in_queue
    assert model.claim(job, "b").refused is RefuseReason.CLOSED
    assert model.verdict(verify, good=True) == "stale", "the first verdict counts"
    model.drain()


def test_nobody_else_gets_a_job_that_is_verified() -> None:
    model = HandoffModel()
    job, grant, verify = committed(model)
    assert model.commit(grant) == "stale"
    for writer in ("a", "b"):
        claimed = model.claim(job, writer)
        assert claimed.refused is RefuseReason.IN_PROGRESS
    model.gave_up(grant, retry=True)
    model.lose("a", others_alive=True)
    assert job.cancelled_in_queue, "nobody is left who would ack it"
    model.lose("a", others_alive=False)
    model.ledger.give_up_all(Outcome.PREFILL_LOST, but_granted=True)
    assert model.verdict(verify, good=True) is None, "its bytes are here, whoever left"
    model.drain()


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("how", ["abort", "deadline", "incarnation", "stuck"])
def test_what_ends_a_job_while_it_is_verified_counts_and_the_verdict_does_not(
    how: str, good: bool
) -> None:
    model = HandoffModel()
    job, _, verify = committed(model)
    if how == "abort":
        model.abort(job)
    elif how == "deadline":
        assert model.tick(TIMEOUT_S - 1) == pytest.approx(1.0), "the timer knows"
        model.tick(1.0)
    elif how == "incarnation":
        model.ledger.new_incarnation("i1")
        model.act()
    else:
        model.ledger.give_up_all(Outcome.ENGINE_STUCK)
        model.act()
    expected = {
        "abort": Outcome.CANCELLED, "deadline": Outcome.TIMEOUT,
        "incarnation": Outcome.PREFILL_LOST, "stuck": Outcome.ENGINE_STUCK,
    }[how]  # fmt: skip
    assert outcome(model) is expected
    assert not [e for e in model.ledger._events if not isinstance(e, Settle)], "nothing to hold"
    model.step()
    assert model.verdict(verify, good=good) == "stale"
    assert outcome(model) is expected
    model.drain()


def test_a_receipt_that_comes_while_verifying_is_cancelled_after_a_mismatch() -> None:
    model = HandoffModel()
    model.ledger.kv_digest = DigestMode.SAMPLE
    job = model.open(3)
    assert job is not None
    model.claim(job, "a")
    model.commit(model.grants[-1])
    model.publish(job)
    model.ledger.verified(job.job.job_id, 1, good=False)
    assert [type(a) for a in model.ledger._actions] == [CancelMessage]
    model.act()
    model.drain()


def test_the_engine_is_woken_by_the_verdict() -> None:
    model = HandoffModel()
    _, _, verify = committed(model)
    woken: list[int] = []
    model.ledger._on_event = lambda: woken.append(1)
    model.verdict(verify, good=False)
    assert woken


# ------------------------------------------------------------------ the verifier


class Bench:
    """A verifier over random bytes, and what a right prefill worker would have sent."""

    def __init__(self) -> None:
        layout = dense_layout(2, NUM_BLOCKS, 2, 128)
        self.data = random_bytes(extent(layout), 7)
        self.memory = memory_over(self.data, layout)
        self.model = HandoffModel()
        self.job, _, self.asked = committed(self.model)
        self.verifier = Verifier(self.model.ledger, [self.memory])

    def verify(self, mode: DigestMode = DigestMode.FULL, **changes: Any) -> Verify:
        asked = self.asked
        checked = sampled(mode, len(asked.blocks), asked.job_digest, asked.attempt)
        digest = BlockDigester(self.memory).digest([asked.blocks[i] for i in checked])
        fields: dict[str, Any] = {
            "job_id": asked.job_id, "attempt": asked.attempt, "blocks": asked.blocks,
            "order": asked.order, "hit_tokens": asked.hit_tokens, "tokens": asked.tokens,
            "kv_digest": mode, "job_digest": asked.job_digest, "digest": digest, **changes,
        }  # fmt: skip
        return Verify(**fields)

    def settle(self, verify: Verify, instance: str = "prefill-9") -> str | None:
        return asyncio.run(self.verifier.settle(verify, instance))


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.verifier.close()


def counted(result: str) -> float:
    value: float = metrics.KV_DIGEST.labels(result)._value.get()
    return value


@pytest.mark.parametrize("mode", [DigestMode.FULL, DigestMode.SAMPLE])
def test_equal_bytes_pass(bench: Bench, mode: DigestMode) -> None:
    before = counted("match"), counted("mismatch")
    assert bench.settle(bench.verify(mode)) is None
    assert (counted("match"), counted("mismatch")) == (before[0] + 1, before[1])


def test_a_changed_byte_names_job_worker_and_block(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    verify, before = bench.verify(), counted("mismatch")
    layout = bench.memory.layout
    second = verify.blocks[1]
    bench.data[layout.layer_stride + second * layout.block_stride + 200] ^= 1
    assert bench.settle(verify) == "digest_mismatch"
    assert counted("mismatch") == before + 1
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    for named in (verify.job_id, "prefill-9", f"block {second}, number 1 of the 2"):
        assert named in line


@pytest.mark.parametrize("tokens", [5, 6, 7, 8])
def test_digests_of_pieces_leave_out_pieces_without_a_token(tokens: int) -> None:
    """Blocks of 4 tokens here, and of 6 at the prefill worker: pieces of 2 tokens."""
    layout = replace(dense_layout(2, NUM_BLOCKS, 2, 128), units=2, sections=((2, 16), (1, 32)))
    data = random_bytes(extent(layout), 7)
    memory = memory_over(data, layout)
    verifier = Verifier(HandoffModel().ledger, [memory], 4)
    pieces = [6, 7, 10, 11][: -(-tokens // 2)]
    digest = BlockDigester(cut_memory(memory, 2)).digest(pieces)
    verify = Verify("j", 1, (3, 5), ONE_TABLE, 8, tokens, DigestMode.FULL, b"d", digest)
    assert verifier._compare(verify, 6) == ""
    assert "its digest has" in verifier._compare(verify, 4), "there it is of whole blocks"
    begin = 5 * layout.block_stride
    data[begin + 16] ^= 1  # the second piece of block 5
    found = verifier._compare(verify, 6)
    assert ("the first is block 5, number 3" in found) == (len(pieces) == 4)
    data[begin] ^= 1  # the first piece
    assert "the first is block 5, number 2" in verifier._compare(verify, 6)
    verifier.close()


def test_digests_of_pieces_are_in_the_order_of_the_prompt() -> None:
    """A hit of 4 tokens, then 7 more. The second group begins at position 2."""
    layout = replace(dense_layout(2, NUM_BLOCKS, 2, 128), units=2, sections=((2, 16), (1, 32)))
    data = random_bytes(extent(layout), 7)
    memory = memory_over(data, layout)
    verifier = Verifier(HandoffModel().ledger, [memory], 4)
    digest = BlockDigester(cut_memory(memory, 2)).digest([6, 7, 10, 18, 11, 19])
    order = BlockOrder((0, 2))
    assert order.ids([[2, 3, 5], [0, 0, 9]], 1, 3) == [3, 5, 9]
    verify = Verify("j", 1, (3, 5, 9), order, 4, 7, DigestMode.FULL, b"d", digest)
    assert verifier._compare(verify, 6) == ""
    verifier.close()


@pytest.mark.parametrize("digest", [b"", b"x", b"x" * (3 * DIGEST_BYTES)], ids=len)
def test_a_digest_that_is_missing_short_or_long_is_a_mismatch(bench: Bench, digest: bytes) -> None:
    assert bench.settle(bench.verify(digest=digest)) == "digest_mismatch"


def test_a_check_that_fails_is_a_mismatch_and_not_silence(bench: Bench) -> None:
    assert bench.settle(bench.verify(blocks=(3, 10**6))) == "digest_mismatch"


def test_of_a_job_that_ended_meanwhile_nothing_is_said(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Its blocks may hold another prompt's KV by now."""
    verify, before = bench.verify(digest=b""), (counted("match"), counted("mismatch"))
    bench.model.abort(bench.job)
    assert bench.settle(verify) == "stale"
    assert (counted("match"), counted("mismatch")) == before
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


def test_a_worker_that_is_wrong_again_and_again_is_named(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(SUSPECT):
        assert "pullfill drain" not in caplog.text
        bench.settle(bench.verify(digest=b""))
        bench.model.step()
        bench.asked = committed(bench.model)[2]
    assert "pullfill drain prefill-9" in caplog.text


def test_close_waits_for_the_check_under_way(bench: Bench) -> None:
    """Nothing may read the KV memory when it goes."""
    entered, go = threading.Event(), threading.Event()
    (digester,) = bench.verifier._made(1)
    real = digester.digest

    def slow(ids: Any) -> bytes:
        entered.set()
        assert go.wait(10)
        return real(ids)

    digester.digest = slow  # type: ignore[method-assign]
    check = threading.Thread(target=lambda: bench.settle(bench.verify()))
    check.start()
    assert entered.wait(10)
    closer = threading.Thread(target=bench.verifier.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    go.set()
    closer.join(10)
    check.join(10)
    assert not closer.is_alive()


def test_nothing_is_made_where_nothing_is_asked(bench: Bench) -> None:
    ledger = bench.model.ledger
    assert verifier_for(ledger, None, 1) is None
    ledger.kv_digest = DigestMode.OFF
    assert verifier_for(ledger, [bench.memory], 1) is None
