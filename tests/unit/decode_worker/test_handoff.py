"""Jobs on their way from the engine thread to the queue: each is published, the loop woken once."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.decode_worker.forecast import Links
from pullfill.decode_worker.handoff import OpenedJob
from pullfill.decode_worker.ledger import Entry, Settle
from pullfill.decode_worker.peers import Peer
from pullfill.errors import HandoffError, Outcome, QueueFull
from pullfill.queue.contract import Receipt, Urgency
from pullfill.wire import (
    Claim,
    Commit,
    GiveUp,
    PrefillJob,
    Progress,
    Ready,
    StageTimings,
)
from tests.support import said
from tests.support.control_rig import handoff_of, hello
from tests.support.loopback import LoopbackFences
from tests.support.waiting import soon


class Rig:
    """A handoff, and a queue that stores what is published. refuses: what it raises instead."""

    def __init__(self) -> None:
        self.stored: list[tuple[str, Urgency]] = []
        self.claims: list[str] = []
        self.commits: list[str] = []
        self.refuses: QueueFull | None = None
        self.fences = LoopbackFences(8)
        self.links = Links()
        self.handoff = handoff_of("d", self.fences, self, links=self.links)
        self.ledger, self.peers = self.handoff.ledger, self.handoff.peers
        self.answers: list[Any] = []
        channel: Any = SimpleNamespace(write=self.answers.append)
        self.peers["p"] = Peer("p", hello("prefill-1"), channel, heard=0.0)

    def write_within_s(self) -> float:
        """How long a job of ten blocks may take."""
        return self.links.forecast(
            160, 10, 1e3, loads={}, done_tokens=0, depth_tokens=0, own_tokens=0
        ).commit_within_s

    def claimed(self, receipt: Receipt) -> None:
        self.claims.append(receipt.job_id)

    def committed(self, receipt: Receipt) -> None:
        self.commits.append(receipt.job_id)

    async def publish(self, job_id: str, body: bytes, tokens: int, urgency: Urgency) -> Receipt:
        if self.refuses is not None:
            raise self.refuses
        self.stored.append((job_id, urgency))
        return Receipt(job_id, len(self.stored), False, "s")

    def send(self, job_id: str, urgency: Urgency = Urgency.NORMAL) -> None:
        """Open a job, and have it published. The engine thread's part."""
        entry = Entry(job_id, f"r-{job_id}", (1,), 0, timeout_s=60.0)
        self.ledger.open(entry)
        self.handoff.publish(OpenedJob(entry, said.blank(PrefillJob), [1, 2, 3], urgency))


async def test_a_job_is_published_with_its_urgency_and_claimed_if_the_claim_came_first() -> None:
    """Otherwise the queue would believe that the job waits."""
    rig = Rig()
    rig.send("waits", Urgency.LOOSE)
    rig.send("taken", Urgency.TIGHT)
    said.grant(rig.ledger, "taken", "i0", "writer")
    await soon(lambda: rig.claims)
    assert rig.stored == [("waits", Urgency.LOOSE), ("taken", Urgency.TIGHT)]
    assert rig.claims == ["taken"]
    rig.handoff.grant(rig.peers["p"], Claim(rid=1, job_id="waits", incarnation="i0"))
    assert rig.claims == ["taken", "waits"]


async def test_a_job_that_was_committed_before_the_queue_has_answered_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    real = rig.publish

    async def publish(job_id: str, *args: Any) -> Receipt:
        receipt = await real(job_id, *args)
        assert said.grant(rig.ledger, job_id, "i0", "writer").fence
        if job_id == "done":
            told = said.blank(Commit, job_id=job_id, attempt=1, incarnation="i0", blocks=1)
            assert rig.ledger.commit(told, "writer") is None
        return receipt

    monkeypatch.setattr(rig, "publish", publish)
    for name in ("done", "claimed"):
        rig.send(name)
    await soon(lambda: len(rig.claims) == 2)
    assert rig.commits == ["done"]
    assert rig.ledger.take_actions() == [], "the prefill worker acks it"


@pytest.mark.parametrize(
    ("retryable", "outcome"), [(True, Outcome.QUEUE_FULL), (False, Outcome.PUBLISH_FAILED)]
)
async def test_a_job_that_nats_does_not_take_is_told_but_for_a_full_queue(
    retryable: bool, outcome: Outcome, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    rig.refuses = QueueFull("too large")
    rig.refuses.retryable = retryable
    rig.send("j")
    await soon(lambda: rig.ledger.has_events)
    assert [e.outcome for e in rig.ledger.take_events() if isinstance(e, Settle)] == [outcome]
    assert len(caplog.records) == (not retryable)


async def test_a_writer_that_was_given_up_says_nothing_about_its_link_or_the_job() -> None:
    """It may have been stopped in its write for a minute. That kept later prompts local."""
    rig = Rig()
    peer = rig.peers["p"]
    about: dict[str, Any] = {"job_id": "j", "attempt": 1, "incarnation": "i0"}
    commit = Commit(rid=1, blocks=1, kv_bytes=1, timings=StageTimings(kv_write_ms=60e3), **about)
    rig.send("j")
    await soon(lambda: rig.stored)
    assert said.grant(rig.ledger, "j", "i0", "p").fence
    rig.ledger.gave_up(GiveUp(cause="why", retry=True, **about), "p")
    before = rig.write_within_s()
    for _ in range(3):
        rig.handoff.progress(peer, Progress(blocks=4, write_s=60.0, **about))
        rig.handoff.commit(peer, commit)
    assert rig.write_within_s() == before
    assert [answer.ok for answer in rig.answers] == [False] * 3
    assert rig.commits == [], "the queue goes on with the job"
    assert said.grant(rig.ledger, "j", "i0", "p").fence
    rig.handoff.commit(peer, said.blank(Commit, blocks=1, **{**about, "attempt": 2}))
    assert rig.commits == ["j"]


async def test_a_job_that_has_ended_is_not_read() -> None:
    rig, wanted = Rig(), list[bool]()

    async def read(fence: Any, source: Any, target: Any, is_wanted: Callable[[], bool]) -> Any:
        wanted.append(is_wanted())
        rig.ledger.give_up("j", Outcome.CANCELLED)
        wanted.append(is_wanted())
        raise HandoffError("its job ended before it was read")

    peer = rig.peers["p"]
    peer.reader = SimpleNamespace(read=read, moved_bytes=0)  # type: ignore[assignment]
    rig.send("j")
    await soon(lambda: rig.stored)
    assert said.grant(rig.ledger, "j", "i0", "p").fence
    told = said.blank(Ready, job_id="j", attempt=1, incarnation="i0", block_ids=bytes(4))
    rig.handoff.ready(peer, told)
    await soon(lambda: rig.answers)
    rig.handoff.ready(peer, told)
    assert (wanted, rig.commits) == ([True, False], [])
    assert [rig.answers[i].ok for i in (0, -1)] == [False] * 2, "each is answered"
    assert rig.ledger.open_jobs == 0
