"""What is read from vLLM's scheduler, and the limits that are set there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine import requests, view
from pullfill.engine.kv_events import Places
from pullfill.engine.view import PrefillChunks, Seats, View
from pullfill.errors import Outcome
from tests.support.fakes import FakePool, FakeRequest
from tests.unit.decode_worker.test_scheduler import Rig

BLOCK, HASH_BLOCK = 8, 4
STEP, SEATS = 1024, 3


class Pool(FakePool):
    """left: how many of its blocks are free."""

    num_gpu_blocks, enable_caching, left = 101, True, 100

    def get_num_free_blocks(self) -> int:
        return self.left

    def cache(self, hashes: Iterable[str]) -> None:
        self.cached |= {(one, 2): 1 for one in hashes}


class Scheduler:
    """The scheduler, and the engine core that has it."""

    kv_cache_config = connector = vllm_config = None

    def __init__(self, threshold: int = 0) -> None:
        self.scheduler = self
        self.pool = Pool(2, hash_block_size=HASH_BLOCK)
        self.kv_cache_manager = SimpleNamespace(block_pool=self.pool)
        self.requests: dict[str, Any] = {}
        self.counts = (0, 0)
        self._inflight_prefills = set[Any]()
        self.scheduler_config = SimpleNamespace(
            long_prefill_token_threshold=threshold, enable_chunked_prefill=True, policy="fcfs"
        )
        self.max_num_scheduled_tokens = STEP
        self.num_spec_tokens = 0
        self.running: list[Any] = []
        self.waiting = deque[Any]()
        self.finished_recving_kv_req_ids = {"come"}
        self.kv_holding_waiting: list[Any] = []
        self.max_num_active_reqs = SEATS

    @property
    def limits(self) -> tuple[int, int]:
        return self.scheduler_config.long_prefill_token_threshold, self.max_num_scheduled_tokens

    @property
    def seats(self) -> int:
        return self.max_num_active_reqs

    def get_request_counts(self) -> tuple[int, int]:
        return self.counts

    def add(self, name: str, prompt: int, computed: int = 0) -> FakeRequest:
        request = FakeRequest(name, list(range(prompt)), num_computed_tokens=computed)
        request.block_hashes = [f"{name}-{i}" for i in range(prompt // HASH_BLOCK)]
        self.requests[name] = request
        return request


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    monkeypatch.setattr(view, "places_of", lambda _: Places({2: 1}, BLOCK))
    return Scheduler()


def test_tokens_that_are_to_be_computed(scheduler: Scheduler) -> None:
    seen = View(scheduler)
    idle = seen.load(draining=True)
    assert (idle.uncached_tokens_queued, idle.active_blocks, idle.draining) == (0, 0, True)
    scheduler.counts, scheduler.pool.left = (2, 2), 70
    scheduler.add("generates", 50, computed=49)
    scheduler.add("half", 50, computed=20)
    scheduler.add("remote", 50, computed=49)  # vLLM says so before its KV has come
    scheduler.add("new", 41)
    hit = scheduler.add("hit", 41)
    scheduler.pool.cache(hit.block_hashes[:6])  # 3 blocks of 2 hashes each
    skips = scheduler.add("skips", 41)
    skips.skip_reading_prefix_cache = True
    scheduler.pool.cache(skips.block_hashes)
    report = seen.load(draining=False)
    assert (report.running, report.waiting) == (2, 2)
    assert report.uncached_tokens_queued == (50 - 20) + 41 + (41 - 3 * BLOCK) + 41
    assert (report.active_blocks, report.free_blocks) == (30, 70)


def test_every_length_of_a_hit_is_found(scheduler: Scheduler) -> None:
    request = scheduler.add("hit", 6 * BLOCK)
    for cached in range(7):
        scheduler.pool.cache(request.block_hashes[: 2 * cached])
        # The last token is always computed, so the last block is never a hit.
        assert View(scheduler).hit(request) == min(cached, 5) * BLOCK


def test_streams_come_first_then_prompts_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = SimpleNamespace(WAITING_FOR_REMOTE_KVS="loading")
    monkeypatch.setattr(requests, "statuses", lambda: loading)
    made = Scheduler()
    running = [made.add(name, 100) for name in ("b", "a", "stream")]
    made.running = running
    running[2].num_computed_tokens = 99
    made.waiting.extend(made.add(name, 100) for name in ("d", "new", "c"))
    chunks = PrefillChunks(made)
    assert chunks.streams() == (1, 99)
    made.kv_holding_waiting = [
        SimpleNamespace(request_id=name, status="loading") for name in ("loads", "come")
    ]
    assert [r.request_id for r in chunks.prompts()] == ["b", "a", "come", "d", "new", "c"]
    chunks.take({"a": 0, "b": 1, "c": 2, "d": 3, "new": -1}, 40, 90)
    assert [r.request_id for r in made.running] == ["stream", "a", "b"]
    assert [r.request_id for r in made.waiting] == ["new", "c", "d"]
    assert made.limits == (40, 90)


@pytest.mark.parametrize(("threshold", "left"), [(0, STEP - 1), (100, 100), (STEP, STEP - 1)])
def test_the_last_token_of_a_step_can_be_left_to_others(threshold: int, left: int) -> None:
    made = Scheduler(threshold)
    chunks = PrefillChunks(made)
    chunks.leave_one()
    assert made.limits == (left, STEP)
    chunks.take({}, 50, 100)
    chunks.release()
    assert made.limits == (left, STEP)


@pytest.mark.parametrize("uncut", [False, True])
def test_vllm_tells_whether_it_cuts_images(uncut: bool) -> None:
    made = Scheduler()
    made.scheduler_config.disable_chunked_mm_input = uncut
    text, image = FakeRequest("text", [1]), FakeRequest("image", [1], mm_features=[object()])
    chunks = PrefillChunks(made)
    assert [chunks.whole(request) for request in (text, image)] == [False, uncut]


def test_a_prompt_alone_needs_no_order() -> None:
    made = Scheduler()
    chunks = PrefillChunks(made)
    assert chunks.idle
    made.waiting.append(made.add("a", 100))
    made.counts = (0, 1)
    assert chunks.idle, "vLLM gives it the whole step"
    made.counts = (1, 1)
    assert not chunks.idle
    made.waiting.clear()
    assert chunks.idle, "two streams"


def test_what_a_step_computes_is_read_from_its_plan() -> None:
    cached = SimpleNamespace(req_ids=["stream", "half"], num_computed_tokens=[500, 100])
    output = SimpleNamespace(
        num_scheduled_tokens={"stream": 8, "half": 64, "new": 200},
        scheduled_new_reqs=[SimpleNamespace(req_id="new", num_computed_tokens=32)],
        scheduled_cached_reqs=cached,
    )
    assert set(PrefillChunks(Scheduler()).parts(output)) == {(32, 200), (500, 8), (100, 64)}


@pytest.mark.parametrize("end", ["settled", "finished"])
def test_a_remote_prompt_keeps_a_seat_until_it_can_run_or_is_over(end: str) -> None:
    made = Scheduler()
    rig = Rig(seats=Seats(made))
    request = rig.send(64, name="r")
    rig.send(64, name="s")
    rig.side.step_done()
    assert made.seats == 1
    if end == "finished":
        rig.side.request_finished(request)
    else:
        first = rig.published[0]
        rig.ledger.give_up(first.entry.job_id, Outcome.PUBLISH_FAILED)
        rig.side.finish()
    assert made.seats == 2
