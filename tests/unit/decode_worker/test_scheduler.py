"""The decode connector's scheduler half against a pool and requests that count like vLLM's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.decode_worker.handoff import OpenedJob
from pullfill.decode_worker.ledger import Ledger
from pullfill.decode_worker.request_trace import RequestTraces
from pullfill.decode_worker.scheduler import DecodeScheduler, JobBlocks
from pullfill.errors import Outcome
from pullfill.queue.contract import Urgency
from pullfill.wire import MAX_TEXT, RouterConfig, RouterPolicy
from tests.support.fakes import FakeClock, FakePool, FakeRequest, FakeTier, situation, unmeasured
from tests.support.handoff_model import BLOCK, HandoffModel
from tests.support.loopback import LoopbackFences


class Rig:
    """A DecodeScheduler with everything around it at hand. parts: its optional arguments."""

    def __init__(self, **parts: Any) -> None:
        self.clock = FakeClock()
        self.published: list[OpenedJob] = []
        self.told: dict[str, Any] = {}
        self.config = RouterConfig(policy=RouterPolicy.ALWAYS_REMOTE)
        self.ledger = Ledger(LoopbackFences(8), incarnation="i", clock=self.clock)
        self.traces = RequestTraces("decode-1", self.clock)
        self.pool = FakePool(64)
        self.blocks = JobBlocks(BLOCK, self.pool)
        self.side = DecodeScheduler(
            self.blocks,
            self.ledger,
            situation=lambda r, h: situation(r, h, self.config, self.traces, **self.told),
            publish=self.published.append,
            traces=self.traces,
            meter=unmeasured(),
            instance_id="decode-1",
            compat_hash="c",
            **parts,
        )

    def send(self, tokens: int, hit: int = 0, name: str = "r", **fields: Any) -> FakeRequest:
        """Schedule a request up to its allocation; it must go remote."""
        request = FakeRequest(name, list(range(100, 100 + tokens)), **fields)
        external, asynchronous = self.side.decide(request, hit)
        assert asynchronous
        blocks = self.pool.allocate(-(-(hit + external) // BLOCK))
        self.side.enqueue(request, [blocks], external)
        return request


def test_a_prompt_that_stays_for_the_depth_of_the_queue_asks_for_a_new_count() -> None:
    told = list[int]()
    rig = Rig(queue_full=lambda: told.append(1))
    request = FakeRequest("r", list(range(100)))
    assert rig.side.decide(request, 0)[1]
    assert not told
    rig.told["queue_jobs"] = rig.config.max_prefill_queue_size
    assert not rig.side.decide(request, 0)[1]
    assert told


@pytest.mark.parametrize("tokens", [2, BLOCK + 1, BLOCK + 2, BLOCK + 3])
def test_a_worker_that_speculates_computes_the_last_two_tokens(tokens: int) -> None:
    """With one token left vLLM would add drafts that are always rejected."""
    rig = Rig()
    rig.blocks.local_tokens = rig.told["local_tokens"] = 2
    blocks = -(-(tokens - 2) // BLOCK)
    assert rig.blocks.targets(tokens, 0) == blocks
    if tokens == 2:
        assert rig.side.decide(FakeRequest("r", [1, 2]), 0) == (0, False)
        return
    request = rig.send(tokens)
    (job,) = rig.published
    assert job.token_ids == request.prompt_token_ids[: tokens - 2]  # type: ignore[index]
    assert len(job.entry.blocks) == blocks


def test_more_blocks_than_needed_are_not_granted() -> None:
    """vLLM may hand over lookahead blocks; the writer gets none of them."""
    rig = Rig()
    request = FakeRequest("r", list(range(2 * BLOCK + 1)))
    external, _ = rig.side.decide(request, 0)
    rig.side.enqueue(request, [[9, 8, 7, 6]], external)
    assert rig.published[0].entry.blocks == (9, 8)


@pytest.mark.essential
def test_a_hit_is_published_only_after_the_step_that_may_compute_it() -> None:
    """vLLM caches a block when it schedules its tokens: another request of the same step can hit
    blocks that hold nothing yet, and a prefill worker would read them within milliseconds."""
    rig = Rig()
    rig.send(3 * BLOCK, hit=BLOCK, name="hit")
    rig.send(3 * BLOCK, name="cold")
    (job,) = rig.published
    assert job.entry.request_id == "cold", "no hit, nothing to wait for"
    rig.side.collect()
    assert len(rig.published) == 1
    rig.side.step_done()
    assert [job.entry.request_id for job in rig.published] == ["cold", "hit"]
    rig.side.step_done()
    assert len(rig.published) == 2


@pytest.mark.parametrize("hit", [BLOCK, 0], ids=["hit", "cold"])
def test_a_job_waits_for_every_step_that_runs_before_its_own(hit: int) -> None:
    """With pipeline parallelism the step that computes the hit may still run when later ones are
    scheduled. With asynchronous scheduling the step under way may write one more token of the
    request that had the job's blocks until now."""
    rig = Rig()
    rig.side.collect()
    for name in ("first", "second"):
        rig.send(3 * BLOCK, hit=hit, name=name)
        rig.side.collect()
    rig.side.step_done(2)
    assert rig.published == []
    rig.side.step_done(1)
    assert [job.entry.request_id for job in rig.published] == ["first"]
    rig.side.step_done()
    assert [job.entry.request_id for job in rig.published] == ["first", "second"]


def test_vllm_may_overrule() -> None:
    rig = Rig()
    request = FakeRequest("r", list(range(20)))
    assert rig.side.decide(request, 0)[1]
    rig.side.enqueue(request, [list(range(5))], 0)
    assert rig.ledger.open_jobs == 0
    record = rig.traces.finish("r")
    assert (record.path, record.reason) == ("local", "engine_declined")


# ------------------------------------------------------------------ what comes back


@pytest.mark.essential
def test_the_hold_comes_before_the_report_that_frees() -> None:
    """In one step: without the hold, the pool would give the blocks away after the report."""
    model = HandoffModel()
    job = model.open(3, 1)
    model.claim(job, "a")
    assert model.begin_batch(model.grants[0])
    model.tick(3600.0)
    loaded, failed = model.side.collect()
    assert (loaded, failed) == ([], [job.request.request_id])
    assert all(model.pool.blocks[b].ref_cnt >= 2 for b in job.blocks)
    job.reports.append(False)
    model._free(job)
    model.check()
    model.end_batch(model.grants[0])
    model.tick()
    model.step()
    model.drain()


def test_a_job_has_the_urgency_salt_and_priority_of_its_request() -> None:
    rig = Rig()
    for ttft_ms in (100, None, 60_000):
        params = SimpleNamespace(extra_args={"ttft_ms": ttft_ms} if ttft_ms else None)
        rig.send(
            2 * BLOCK, name=f"r{ttft_ms}", sampling_params=params, cache_salt="s" * MAX_TEXT,
            priority=-3,
        )  # fmt: skip
    assert [job.urgency for job in rig.published] == list(Urgency)
    jobs = {(each.job.cache_salt, each.job.priority) for each in rig.published}
    assert jobs == {("s" * MAX_TEXT, -3)}


def test_a_job_is_due_when_its_request_is_whatever_that_has_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(time=lambda: 1000.0)
    monkeypatch.setattr("pullfill.decode_worker.scheduler.time", clock)
    rig = Rig()
    for ttft_ms in (100, None):
        params = SimpleNamespace(extra_args={"ttft_ms": ttft_ms} if ttft_ms else None)
        rig.send(2 * BLOCK, name=f"r{ttft_ms}", sampling_params=params, arrival_time=980.0)
    usual_s = rig.config.ttft_ms / 1e3
    assert [each.job.due_s for each in rig.published] == pytest.approx([0.1 - 20.0, usual_s - 20.0])


# ------------------------------------------------------------------ two KV cache groups


@pytest.mark.parametrize("hashes", [1, 2], ids=["one hash", "--prefix-match-unit"])
@pytest.mark.parametrize("cached", [True, False])
def test_what_a_window_sees_at_the_end_of_the_hit_is_held_for_the_job(
    cached: bool, hashes: int
) -> None:
    """The request needs the window at the end of the prompt, the prefill worker that at the end of
    the hit. What was evicted from there cannot be read.

    hashes: number of hashes of each block."""
    rig = Rig()
    rig.pool.hash_block_size = BLOCK // hashes
    rig.blocks.kept_from = lambda tokens: (0, max(0, tokens // BLOCK - 2))
    request = FakeRequest("r", list(range(6 * BLOCK + 2)))
    names = [f"h{at}" for at in range(6)]
    request.block_hashes = [part for name in names for part in [f"{name}-"] * (hashes - 1) + [name]]
    known = {"h1": 31, "h2": 32} if cached else {"h1": 31}
    rig.pool.cached = {(name, 1): block for name, block in known.items()}
    external, _ = rig.side.decide(request, 3 * BLOCK)
    rig.side.enqueue(request, [list(range(11, 18)), [0, 0, 0, 0, 25, 26, 27]], external)
    rig.side.step_done()
    (opened,) = rig.published
    targets = (14, 15, 25, 16, 26, 17, 27)
    entry, job = opened.entry, opened.job
    assert job.kept_from == (0, 4)
    assert rig.blocks.targets(request.num_prompt_tokens, 3 * BLOCK) == len(targets)
    assert rig.blocks.longest_kept(8 * BLOCK) == 2 * BLOCK
    assert rig.ledger.sums().uncomputed == 3 * BLOCK + 1, "however many blocks each token has"
    if not cached:
        assert (job.read_from, entry.blocks) == ((0, 3), (11, 12, 13, *targets))
        assert entry.first_target == 3
        assert rig.pool.refs(31) == 0
        return
    assert (job.read_from, entry.blocks) == ((0, 1), (11, 12, 31, 13, 32, *targets))
    assert entry.first_target == 5
    assert (rig.pool.refs(31), rig.pool.refs(32)) == (1, 1)
    rig.side.request_finished(request)
    rig.side.collect()
    assert (rig.pool.refs(31), rig.pool.refs(32)) == (0, 0)


# ------------------------------------------------------------------ beside vLLM's own KV offloading


PROMPT = 10 * BLOCK


def rig_with(found: int | None) -> tuple[Rig, FakeTier]:
    tier = FakeTier(found)
    return Rig(tier=tier), tier


def received(*request_ids: str) -> SimpleNamespace:
    """What a step tells vLLM: the tier has loaded these."""
    return SimpleNamespace(finished_recving=set(request_ids))


def test_vllm_asks_again_while_the_tier_does_not_know() -> None:
    rig, tier = rig_with(None)
    request = FakeRequest("r", list(range(PROMPT)))
    assert rig.side.decide(request, 0) == (None, False)
    tier.found = 0
    assert rig.side.decide(request, 0) == (PROMPT - 1, True)


def test_without_a_hit_of_it_a_job_waits_for_the_step_that_ends_its_copies() -> None:
    """It may copy from blocks of requests that have ended, in the step that allocates them."""
    rig, tier = rig_with(0)
    rig.send(PROMPT, hit=2 * BLOCK)
    assert rig.published == []
    rig.side.collect()
    assert rig.published == []
    rig.side.step_done()
    (job,) = rig.published
    assert tier.claimed == set(job.entry.blocks[2:]), "not the hit, which others use"


def test_a_prefill_worker_gets_the_rest_once_the_hit_is_loaded() -> None:
    rig, tier = rig_with(3 * BLOCK)
    stats = SimpleNamespace(num_cached_tokens=PROMPT - 1)  # as vLLM counts what is not computed
    request = FakeRequest("r", list(range(100, 100 + PROMPT)), prefill_stats=stats)
    assert rig.side.decide(request, BLOCK) == (PROMPT - 1 - BLOCK, True)
    blocks = rig.pool.allocate(10)
    rig.side.enqueue(request, [blocks], PROMPT - 1 - BLOCK)
    assert stats.num_cached_tokens == BLOCK + 3 * BLOCK, "its own hit, and the tier's"
    assert tier.loads == [("r", 3 * BLOCK)]
    rig.side.collect()
    rig.side.step_done()
    rig.clock.advance(2 * rig.config.claim_timeout_s)
    rig.ledger.tick()
    assert rig.published == [], "the hit is not there yet"

    output = received("r", "other")
    rig.side.tier_loaded(output)
    assert output.finished_recving == {"other"}, "vLLM would run it without the rest"
    (opened,) = rig.published
    entry, job = opened.entry, opened.job
    assert (job.hit_tokens, len(opened.token_ids)) == (4 * BLOCK, PROMPT - 1)
    assert entry.blocks == tuple(blocks)
    assert (entry.first_target, entry.tokens) == (4, PROMPT - 1 - 4 * BLOCK)
    rig.side.tier_loaded(received("r"))
    assert len(rig.published) == 1


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_job_that_ends_while_the_hit_is_loaded_is_reported_after_the_load(
    cancelled: bool,
) -> None:
    """vLLM frees the blocks when it hears of the end, and the tier still writes into them."""
    rig, _ = rig_with(3 * BLOCK)
    request = rig.send(PROMPT)
    if cancelled:
        rig.side.request_finished(request)
    else:
        rig.ledger.give_up_all(Outcome.PREFILL_LOST)
    for _ in range(2):
        assert rig.side.collect() == ([], [])
        rig.side.step_done()
    rig.side.tier_loaded(received("r"))
    assert rig.side.has_work
    assert rig.side.collect() == ([], ["r"])
    assert not rig.side.has_work
    assert rig.published == []
