"""Which prefill workers may bring KV, by what the self-check found; the engine is a fake."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from pullfill.decode_worker import self_check, self_check_requests
from pullfill.decode_worker.ledger import JobState
from pullfill.decode_worker.peers import Peer
from pullfill.decode_worker.self_check import Checks, Ours
from pullfill.decode_worker.self_check_requests import Incomplete, logprobs_to_ask
from pullfill.errors import Outcome
from pullfill.wire import Claim, Refused, RefuseReason, SelfCheck
from tests.support.workers import eventually

OURS = Ours("decode-1", "compat", "ours", 4, 4, 100, 1, "float32", "float32")


@dataclass
class Made:
    pages: list[Any]
    logprobs: dict[int, float] = field(default_factory=dict)
    took_s: float = 0.0


class Engine:
    """In place of `Trials`: a remote prefill is off by `wrong`; the first `absent` never end, and
    none by `silent`."""

    wrong = 0.0
    absent = 0
    silent = ""
    logprobs: Mapping[int, float] = {}

    def __init__(self) -> None:
        self.asked: list[tuple[int, str]] = []
        self.send: Callable[..., None] = lambda *_: None

    async def run(
        self, tokens: Sequence[int], *, salt: str, writer: str = "", blocks: int = 0
    ) -> Made:
        self.asked.append((len(tokens), writer))
        if writer and self.absent:
            self.absent -= 1
            raise Incomplete("gone")
        if writer and writer == self.silent:
            raise Incomplete("no answer")
        kv = np.ones((4, 8), np.float32)
        kv[2, 3] += self.wrong if writer else 0.0
        return Made([kv.view(np.uint8)], dict(self.logprobs))


class Kept:
    def __init__(self) -> None:
        self.current: dict[str, SelfCheck] = {}
        self.kept: list[str] = []
        self.on_change: Callable[[str, SelfCheck | None], None] = lambda *_: None

    def keep(self, pair: str, result: SelfCheck) -> None:
        self.current[pair] = result
        self.kept.append(pair)


@dataclass
class Job:
    job_id: str
    state: JobState = JobState.QUEUED
    settled: bool = False


class Books:
    def __init__(self) -> None:
        self.given_up: list[tuple[str, Outcome]] = []
        self.revoked: list[str] = []
        self.state = JobState.QUEUED

    def find(self, job_id: str) -> Job:
        return Job(job_id, self.state)

    def give_up(self, job_id: str, outcome: Outcome) -> None:
        self.given_up.append((job_id, outcome))

    def distrust(self, writer: str) -> None:
        self.revoked.append(writer)


class Wire:
    def __init__(self) -> None:
        self.said: list[object] = []

    def write(self, message: object) -> None:
        self.said.append(message)


class Rig:
    def __init__(self, ours: Ours = OURS) -> None:
        self.engine, self.kept, self.books = Engine(), Kept(), Books()
        self.changes = 0
        self.checks = Checks(
            ours, cast(Any, self.engine), cast(Any, self.kept), cast(Any, self.books),
            lambda _job: b"", self._changed,
        )  # fmt: skip

    def _changed(self) -> None:
        self.changes += 1

    def meet(self, name: str = "prefill-1#1", computes: str = "theirs", longest: int = 0) -> Peer:
        peer = Peer(
            name, name.partition("#")[0], cast(Any, Wire()), 0.0, None, computes, cleared=False,
            max_prompt_tokens=longest,
        )  # fmt: skip
        self.checks.met(peer)
        return peer


async def test_nobody_brings_kv_before_the_comparison_and_everybody_of_that_kind_after() -> None:
    rig = Rig()
    peer = rig.meet()
    assert not peer.cleared
    assert rig.checks.reason == "self_check_pending"
    await eventually(lambda: peer.cleared)
    # Prefilled here; then half of it, and all of it, by the prefill worker.
    assert rig.engine.asked == [(16, ""), (9, "prefill-1#1"), (16, "prefill-1#1")]
    assert rig.checks.reason == ""
    assert rig.meet("prefill-2#2").cleared
    assert len(rig.kept.kept) == 1
    assert not rig.meet("prefill-3#3", "otherwise").cleared
    assert rig.checks.reason == ""
    await rig.checks.close()


async def test_a_prefill_worker_that_takes_short_prompts_is_compared_with_one() -> None:
    rig = Rig()
    peer = rig.meet(longest=11)
    await eventually(lambda: peer.cleared)
    assert rig.engine.asked == [(8, ""), (5, "prefill-1#1"), (8, "prefill-1#1")]
    await rig.checks.close()


async def test_who_differs_stays_out_says_by_how_much_and_is_cleared_by_hand() -> None:
    rig = Rig()
    rig.engine.wrong = 1.0
    peer = rig.meet()
    await eventually(lambda: rig.checks.reason == "self_check_failed")
    assert not peer.cleared
    (line,) = rig.checks.failures
    assert "KV differs by 0.354 (rounding explains 0.001)" in line
    assert "prefill-1" in line
    assert "pullfill recheck" in line
    assert not rig.checks.may_claim(peer, Claim(rid=1, job_id="j", incarnation="i"))
    assert rig.books.given_up == [("j", Outcome.SELF_CHECK)]
    assert isinstance(cast(Any, peer.channel).said[-1], Refused)
    rig.engine.wrong = 0.0
    (pair,) = rig.kept.kept
    rig.kept.on_change(pair, None)
    await eventually(lambda: peer.cleared)
    assert rig.checks.failures == []
    await rig.checks.close()


async def test_who_has_not_passed_leaves_each_job_once_to_those_who_have() -> None:
    rig = Rig()
    passed = rig.meet()
    await eventually(lambda: passed.cleared)
    rig.engine.wrong = 1.0
    failed = rig.meet("prefill-2#2", "otherwise")
    await eventually(lambda: bool(rig.checks.failures))

    def refused(job_id: str, number: int = 1) -> RefuseReason:
        ack = f"$JS.ACK.stream.prefill-normal.{number}.1.1.1.0" if number else ""
        claim = Claim(rid=1, job_id=job_id, incarnation="i", ack_subject=ack)
        assert not rig.checks.may_claim(failed, claim)
        said = cast(Any, failed.channel).said[-1]
        assert isinstance(said, Refused)
        return said.reason

    assert refused("j") is RefuseReason.NOT_CLEARED
    assert rig.books.given_up == []
    assert refused("j", 2) is RefuseReason.CLOSED, "it may be the only one with room"
    assert refused("direct", 0) is RefuseReason.CLOSED, "no message would come back"
    assert rig.books.given_up == [("j", Outcome.SELF_CHECK), ("direct", Outcome.SELF_CHECK)]
    rig.books.state = JobState.GRANTED
    assert refused("k") is RefuseReason.IN_PROGRESS
    rig.books.state, passed.pulls = JobState.QUEUED, False
    assert refused("k") is RefuseReason.CLOSED
    await rig.checks.close()


async def test_what_could_not_be_compared_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "_PAUSES_S", (0.01, 0.01))
    rig = Rig()
    rig.engine.absent = 2
    peer = rig.meet()
    await eventually(lambda: peer.cleared)
    assert rig.checks.failures == []
    await rig.checks.close()


@pytest.mark.parametrize(
    ("pause_s", "late"), [(0.01, False), (60.0, True)], ids=["is there too", "comes in a pause"]
)
async def test_a_worker_that_does_not_answer_keeps_no_other_of_its_kind_out(
    monkeypatch: pytest.MonkeyPatch, pause_s: float, late: bool
) -> None:
    """late: the pause between two tries is long by then, and a new worker does not wait for it."""
    monkeypatch.setattr(self_check, "_PAUSES_S", (pause_s, pause_s))
    rig = Rig()
    rig.engine.silent = "prefill-1#1"
    rig.meet("prefill-1#1")
    if late:
        await eventually(lambda: any(writer for _, writer in rig.engine.asked))
    second = rig.meet("prefill-2#2")
    await eventually(lambda: second.cleared)
    await rig.checks.close()


async def test_what_a_worker_computes_when_a_failure_of_its_kind_comes_is_revoked() -> None:
    rig = Rig()
    peer = rig.meet()
    await eventually(lambda: peer.cleared)
    assert rig.books.revoked == []
    (pair,) = rig.kept.current
    rig.kept.on_change(pair, msgspec.structs.replace(rig.kept.current[pair], passed=False))
    assert not peer.cleared
    assert rig.books.revoked == [peer.name]
    await rig.checks.close()


async def test_a_comparison_that_fails_in_a_new_way_is_repeated_after_a_pause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(self_check, "_PAUSES_S", (0.1, 0.1))
    rig = Rig()
    attempts, run = 0, rig.engine.run

    async def fails(*_: object, **__: object) -> Made:
        nonlocal attempts
        attempts += 1
        raise ValueError("a bug")

    # One request fails in each attempt, and the other one succeeds.
    monkeypatch.setattr(
        rig.engine, "run", lambda *a, writer="", **k: (fails if writer else run)(*a, **k)
    )
    peer = rig.meet()
    await asyncio.sleep(0.2)
    assert 1 <= attempts <= 3
    assert not peer.cleared
    assert "ValueError: a bug" in caplog.text
    monkeypatch.setattr(rig.engine, "run", run)
    await eventually(lambda: peer.cleared)
    await rig.checks.close()


async def test_nobody_passes_of_whom_nothing_was_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV of that type is no numbers, and at first there are no log probabilities either."""
    monkeypatch.setattr(self_check, "_PAUSES_S", (0.01, 0.01))
    rig = Rig(replace(OURS, kv_dtype="fp8_ds_mla"))
    peer = rig.meet()
    await eventually(lambda: len(rig.engine.asked) > 3)
    assert not peer.cleared
    assert rig.checks.reason == "self_check_pending"
    rig.engine.logprobs = {1: -0.5}
    await eventually(lambda: peer.cleared)
    (result,) = rig.kept.current.values()
    assert (result.kv_difference, result.logprob_difference) == (None, 0.0)
    await rig.checks.close()


@pytest.mark.parametrize(
    ("kv_dtype", "cheap", "asked"),
    [("float32", True, 5), ("float32", False, None), ("nvfp4", False, 5)],
)
def test_log_probabilities_are_asked_where_they_are_cheap_or_nothing_else_can_be_compared(
    monkeypatch: pytest.MonkeyPatch, kv_dtype: str, cheap: bool, asked: int | None
) -> None:
    monkeypatch.setattr(self_check_requests, "logprobs_are_cheap", lambda: cheap)
    assert logprobs_to_ask(kv_dtype) == asked


async def test_a_passed_result_that_etcd_lost_is_written_again() -> None:
    rig = Rig()
    peer = rig.meet()
    await eventually(lambda: peer.cleared)
    (pair,) = rig.kept.kept
    rig.kept.on_change(pair, None)
    assert rig.kept.kept == [pair, pair]
    assert peer.cleared
    await asyncio.sleep(0)
    assert len(rig.engine.asked) == 3
    await rig.checks.close()


async def test_without_a_model_there_is_nothing_to_compare() -> None:
    rig = Rig()
    assert rig.meet(computes="").cleared
    assert rig.checks.reason == ""
    assert rig.engine.asked == []
    await rig.checks.close()


@pytest.mark.parametrize(("size", "blocks"), [(16, 4), (64, 4), (80, 3), (128, 2), (1056, 2)])
def test_large_blocks_make_no_long_prompt(size: int, blocks: int) -> None:
    assert self_check.wanted_blocks(size) == blocks


async def test_where_nothing_is_compared_every_worker_may_bring_kv() -> None:
    rig = Rig(replace(OURS, computes=""))
    peer = Peer("prefill-1#1", "prefill-1", cast(Any, Wire()), 0.0, cleared=False)
    rig.checks.met(peer)
    assert peer.cleared
    assert rig.changes == 1, "the workers are counted again"
    assert rig.checks.reason == ""
    await rig.checks.close()


async def test_the_trials_of_a_lost_worker_are_given_up() -> None:
    rig = Rig()
    peer = rig.meet()
    rig.checks._jobs["t"] = peer.name
    rig.checks.lost(peer)
    assert rig.books.given_up == [("t", Outcome.PREFILL_LOST)]
    await rig.checks.close()
