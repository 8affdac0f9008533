"""What is read from vLLM's scheduler, and the limits that are set there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine import release, view
from pullfill.engine.kv_events import Places
from pullfill.engine.view import LOOK, PrefillChunks, Seats, View
from pullfill.errors import Outcome
from tests.support.fakes import FakeRequest
from tests.unit.decode_worker.test_scheduler import Rig

BLOCK, HASH_BLOCK = 8, 4
STEP, SEATS = 1024, 3


class Pool:
    """cached: hashes that are cached."""

    num_gpu_blocks = 101
    hash_block_size = HASH_BLOCK
    enable_caching = True

    def __init__(self) -> None:
        self.free = 100
        self.cached: set[str] = set()

    def get_num_free_blocks(self) -> int:
        return self.free

    def get_cached_block(self, block_hash: str, groups: list[int]) -> list[int] | None:
        assert groups == [2]
        return [1] if block_hash in self.cached else None


class Scheduler:
    """The scheduler, and the engine core that has it."""

    kv_cache_config = connector = vllm_config = None

    def __init__(
        self, threshold: int = 0, running: int = 0, drafts: int = 0, able: bool = True
    ) -> None:
        self.scheduler = self
        self.pool = Pool()
        self.kv_cache_manager = SimpleNamespace(block_pool=self.pool)
        self.requests: dict[str, Any] = {}
        self.counts = (0, 0)
        self._inflight_prefills = set[Any]()
        self.scheduler_config = SimpleNamespace(
            long_prefill_token_threshold=threshold, enable_chunked_prefill=able
        )
        self.max_num_scheduled_tokens = STEP
        self.num_spec_tokens = drafts
        self.running = [None] * running
        setattr(self, release.this.seats, SEATS)

    @property
    def limits(self) -> tuple[int, int]:
        return self.scheduler_config.long_prefill_token_threshold, self.max_num_scheduled_tokens

    @property
    def seats(self) -> int:
        return int(getattr(self, release.this.seats))

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


# --------------------------------------------------------------------------- load


def test_tokens_that_are_to_be_computed(scheduler: Scheduler) -> None:
    seen = View(scheduler)
    idle = seen.load(draining=True)
    assert (idle.uncached_tokens_queued, idle.active_blocks, idle.draining) == (0, 0, True)
    scheduler.counts, scheduler.pool.free = (2, 2), 70
    scheduler.add("generates", 50, computed=49)
    scheduler.add("half", 50, computed=20)
    scheduler.add("new", 41)
    hit = scheduler.add("hit", 41)
    scheduler.pool.cached = set(hit.block_hashes[:6])  # 3 blocks of 2 hashes each
    skips = scheduler.add("skips", 41)
    skips.skip_reading_prefix_cache = True
    scheduler.pool.cached |= set(skips.block_hashes)
    report = seen.load(draining=False)
    assert (report.running, report.waiting) == (2, 2)
    assert report.uncached_tokens_queued == (50 - 20) + 41 + (41 - 3 * BLOCK) + 41
    assert (report.active_blocks, report.free_blocks) == (30, 70)


def test_every_length_of_a_hit_is_found(scheduler: Scheduler) -> None:
    request = scheduler.add("hit", 6 * BLOCK)
    for cached in range(7):
        scheduler.pool.cached = set(request.block_hashes[: 2 * cached])
        # The last token is always computed, so the last block is never a hit.
        assert View(scheduler).hit(request) == min(cached, 5) * BLOCK


# --------------------------------------------------------------------------- chunks


@pytest.mark.parametrize(("running", "prompts", "drafts"), [(5, 0, 0), (8, 1, 0), (8, 3, 2)])
def test_prompts_share_what_the_streams_leave(running: int, prompts: int, drafts: int) -> None:
    made = Scheduler(running=running, drafts=drafts)
    PrefillChunks(made).limit(100, prompts)
    each, total = made.limits
    # All running requests, and the prompts among them, leave something for a prompt that begins.
    assert prompts * each <= 100
    assert total - running * (1 + drafts) == 100
    assert prompts * each < 100 or not prompts


@pytest.mark.parametrize(("threshold", "left"), [(0, STEP - 1), (100, 100), (STEP, STEP - 1)])
def test_the_last_token_of_a_step_can_be_left_to_others(threshold: int, left: int) -> None:
    made = Scheduler(threshold)
    chunks = PrefillChunks(made)
    chunks.leave_one()
    assert made.limits == (left, STEP)
    chunks.limit(50, 1)
    chunks.release()
    assert made.limits == (left, STEP)


def test_what_the_user_has_set_is_a_limit_and_comes_back() -> None:
    made = Scheduler(threshold=64)
    chunks = PrefillChunks(made)
    chunks.limit(500, 1)
    assert made.limits[0] == 64
    chunks.release()
    assert made.limits == (64, STEP)


def test_no_limit_still_leaves_some_tokens_for_prompts_that_wait() -> None:
    made = Scheduler()
    PrefillChunks(made).limit(0, 0)
    assert made.limits == (STEP - LOOK, STEP)


def test_without_chunked_prefill_nothing_is_changed() -> None:
    made = Scheduler(able=False)
    PrefillChunks(made).limit(100, 1)
    assert made.limits == (0, STEP)


# --------------------------------------------------------------------------- seats


def test_each_seat_counts_once() -> None:
    made = Scheduler()
    seats = Seats(made)
    limits = []
    for change in (
        lambda: seats.take("a"),
        lambda: seats.take("a"),
        lambda: seats.take("b"),
        lambda: seats.leave(["x"]),
        lambda: seats.leave(["a", "x"]),
        lambda: seats.leave(["a"]),
        lambda: seats.leave(["b"]),
    ):
        change()
        limits.append(made.seats)
    assert limits == [2, 2, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("end", ["settled", "finished"])
def test_a_remote_prompt_keeps_a_seat_until_it_can_run_or_is_over(end: str) -> None:
    made = Scheduler()
    rig = Rig(seats=Seats(made))
    rig.send(64, name="r")
    rig.send(64, name="s")
    rig.side.step_done()
    assert made.seats == 1
    if end == "finished":
        rig.side.request_finished("r")
    else:
        first = rig.published[0]
        rig.ledger.give_up(first.job_id, Outcome.PUBLISH_FAILED)
        rig.side.finish()
    assert made.seats == 2
