"""The frontend's balancer, and what it knows of the blocks of decode workers."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from pullfill import wire
from pullfill.engine import front_wire
from pullfill.errors import BadMessage
from pullfill.frontend.flight import Flight
from pullfill.frontend.request_log import RequestRecord
from pullfill.frontend.routing.balancer import Balancer, hashes_of
from pullfill.frontend.routing.choice import ALPHA, KNOWN
from pullfill.frontend.routing.prefixes import Prefixes
from pullfill.prefix.events import Ring
from pullfill.wire import DecodePolicy, PrefixHolder
from pullfill.wire.prefix import Op, PrefixFollow
from tests.support.fake_vllm import request

BLOCK = 16
BLOCKS = range(1, 6)
PROMPT = list(range(7, 7 + 20 * BLOCK + 5))


class Worker:
    """A connection to a decode worker whose blocks can be followed."""

    def __init__(self, name: str, block_size: int = BLOCK, missing: str = "") -> None:
        self.instance_id = name
        self.record = SimpleNamespace(control=f"tcp://{name}:1")
        self.ring = Ring(1000)
        self.load: front_wire.LoadReport | None = None
        self.asked: list[PrefixFollow] = []
        self.welcome = front_wire.DecodeWelcome(
            decode_instance=name, vllm_version="0.32.0", max_model_len=1, num_gpu_blocks=1,
            block_size=16, supported_tasks=[], prefix_block_size=block_size,
            no_prefix_events=missing,
        )  # fmt: skip

    def send(self, kind: bytes, payload: bytes) -> None:
        assert kind == front_wire.FOLW
        self.asked.append(wire.decode(payload, PrefixFollow))

    def tell(self, prefixes: Prefixes) -> None:
        """Bring the frontend up to date."""
        worker: Any = self
        prefixes.follow(worker, 0.0)
        for message in self.ring.answer(self.asked[-1]):
            prefixes.take(worker, wire.encode(message), 0.0)


@dataclass
class Rig:
    policy: DecodePolicy = DecodePolicy.KV
    now: float = 0.0

    def __post_init__(self) -> None:
        self.prefixes = Prefixes(1000)
        self.workers: Any = [Worker("a"), Worker("b"), Worker("c")]
        self.min_fetch = 0
        self.balancer = Balancer(
            lambda: self.policy, self.prefixes, min_fetch=lambda: self.min_fetch
        )

    def holds(self, **prompts: Any) -> None:
        """These workers hold the blocks of these requests; all others nothing."""
        for worker in self.workers:
            if (asked := prompts.get(worker.instance_id)) is not None:
                worker.ring.append(Op.STORE, hashes_of(asked, (), BLOCK))
            worker.tell(self.prefixes)

    def choose(self, asked: Any) -> Flight:
        flight = Flight(asked, asked.request_id, RequestRecord(""), "")
        self.balancer.sent(flight, self.balancer.choose(flight, self.workers, self.now), self.now)
        return flight

    def worker_of(self, asked: Any) -> str:
        return at(self.choose(asked))


def at(flight: Flight) -> str:
    assert flight.share is not None
    return flight.share.view.instance_id


@pytest.fixture
async def rig() -> Rig:
    return Rig()


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def counted(policy: str, reason: str) -> float:
    return value("pullfill_decode_choice_total", policy=policy, reason=reason)


async def test_the_policy_may_change_between_requests(rig: Rig) -> None:
    rig.policy = DecodePolicy.ROUND_ROBIN
    assert [rig.worker_of(request(f"r{n}", PROMPT)) for n in range(4)] == ["a", "b", "c", "a"]
    rig.policy = DecodePolicy.KV
    rig.holds(c=request("x", PROMPT))
    assert rig.worker_of(request("r4", PROMPT)) == "c"


async def test_the_choice_is_explained_and_counted(rig: Rig) -> None:
    rig.holds(b=request("x", PROMPT))
    before = counted("kv", "prefix")
    choice = rig.choose(request("r", PROMPT)).record.decode_choice
    assert choice is not None
    assert (choice.policy, choice.matched_tokens, choice.reason) == ("kv", 320, "prefix")
    assert choice.score == ALPHA * 5
    assert counted("kv", "prefix") == before + 1


@pytest.mark.parametrize(
    "other", [{"cache_salt": "s"}, {"lora_request": SimpleNamespace(lora_name="l")}]
)
async def test_salt_and_adapter_make_other_blocks(rig: Rig, other: dict[str, Any]) -> None:
    def tagged(name: str) -> Any:
        made = request(name, PROMPT)
        for key, value in other.items():
            setattr(made, key, value)
        return made

    rig.holds(b=request("x", PROMPT), c=tagged("y"))
    assert rig.worker_of(request("r", PROMPT)) == "b"
    assert rig.worker_of(tagged("r")) == "c"


def test_of_a_prompt_with_an_image_only_the_text_before_it_is_matched() -> None:
    text, image = request("t", PROMPT), request("i", PROMPT)
    image.mm_features = [
        SimpleNamespace(mm_position=SimpleNamespace(offset=at)) for at in (200, 70)
    ]
    whole, before = hashes_of(text, (), BLOCK), hashes_of(image, (), BLOCK)
    assert whole is not None
    assert before is not None
    assert (len(whole), before) == (20, whole[:4])


def test_what_cannot_be_matched_has_no_hashes() -> None:
    embeds, skips = request("e", PROMPT), request("s", PROMPT)
    embeds.prompt_embeds = b"x"
    skips.sampling_params.skip_reading_prefix_cache = True
    assert hashes_of(embeds, (), BLOCK) == []
    assert hashes_of(skips, (), BLOCK) == []
    assert hashes_of(request("n", []), (), BLOCK) == []


def test_a_migrated_answer_is_matched_with_the_tokens_that_are_out() -> None:
    whole = hashes_of(request("t", PROMPT), (), BLOCK)
    parts = hashes_of(request("t", PROMPT[:100]), PROMPT[100:], BLOCK)
    assert whole is not None
    assert parts is not None
    assert parts == whole


async def test_what_workers_report_decides(rig: Rig) -> None:
    rig.holds()
    for worker, queued in zip(rig.workers, (900, 100, 500), strict=True):
        worker.load = front_wire.LoadReport(
            running=1, waiting=0, uncached_tokens_queued=queued, active_blocks=10, free_blocks=90
        )
        rig.balancer.report(worker)
    assert at(rig.choose(request("r", PROMPT))) == "b"


async def test_before_the_workers_have_told_their_blocks_a_hash_names_two(rig: Rig) -> None:
    flight = rig.choose(request("r", PROMPT))
    assert flight.record.decode_choice is not None
    assert flight.record.decode_choice.reason == "hashed"
    rig.holds()
    rig.now += 1.0
    other = rig.choose(request("s", list(range(900, 1300)))).record.decode_choice
    assert other is not None
    assert other.reason == "no_prefix"


def holder(rig: Rig, asked: Any, worker: int) -> PrefixHolder | None:
    flight = Flight(asked, asked.request_id, RequestRecord(""), "")
    rig.balancer.choose(flight, rig.workers, rig.now)
    return rig.balancer.holder(flight, rig.workers[worker])


@pytest.mark.parametrize("policy", [DecodePolicy.KV, DecodePolicy.ROUND_ROBIN])
async def test_the_worker_that_holds_most_is_named(rig: Rig, policy: DecodePolicy) -> None:
    rig.policy = policy
    rig.min_fetch = 2 * BLOCK
    rig.holds(a=request("x", PROMPT[: 4 * BLOCK]), b=request("x", PROMPT[: 9 * BLOCK]))
    asked = request("r", PROMPT)
    expected = PrefixHolder(instance_id="b", control="tcp://b:1", tokens=9 * BLOCK)
    assert holder(rig, asked, 0) == expected
    assert holder(rig, asked, 2) == expected
    assert holder(rig, asked, 1) is None, "it holds most itself"


async def test_what_the_chosen_worker_holds_counts_although_many_hold_more(rig: Rig) -> None:
    rig.workers = [Worker(f"w{n}") for n in range(KNOWN + 2)]
    rig.min_fetch = 2 * BLOCK
    most, least = request("x", PROMPT[: 9 * BLOCK]), request("y", PROMPT[: 8 * BLOCK])
    rig.holds(w0=least, **{w.instance_id: most for w in rig.workers[1:]})
    assert holder(rig, request("r", PROMPT), 0) is None
    assert {holder(rig, request(f"r{n}", PROMPT), 9) for n in range(20)} == {None}


async def test_nobody_is_named_who_holds_hardly_more(rig: Rig) -> None:
    rig.holds(a=request("x", PROMPT[: 4 * BLOCK]), b=request("x", PROMPT[: 5 * BLOCK]))
    rig.min_fetch = 2 * BLOCK
    assert holder(rig, request("r", PROMPT), 0) is None
    assert holder(rig, request("r2", PROMPT[: 2 * BLOCK]), 2) is None, "too short"
    rig.min_fetch = 0
    assert holder(rig, request("r3", PROMPT), 2) is None, "switched off"


# --------------------------------------------------------------------------- the blocks of workers


class Known:
    def __init__(self, max_blocks: int = 1000) -> None:
        self.prefixes = Prefixes(max_blocks)
        self.now = 100.0

    def follow(self, worker: Any) -> None:
        self.prefixes.follow(worker, self.now)

    def answer(self, worker: Any) -> None:
        """Send what the worker was last asked for."""
        for message in worker.ring.answer(worker.asked[-1]):
            self.prefixes.take(worker, wire.encode(message), self.now)

    def state(self, worker: Any) -> str:
        return self.prefixes.state(worker.instance_id)


@pytest.fixture
async def known() -> Known:
    return Known()


async def test_a_worker_is_cold_until_it_has_told_its_blocks(known: Known) -> None:
    worker = Worker("a", block_size=32)
    worker.ring.append(Op.STORE, BLOCKS)
    known.follow(worker)
    assert known.state(worker) == "cold"
    assert known.prefixes.matched(BLOCKS).blocks == {}
    told = value("pullfill_prefix_events_total")
    known.answer(worker)
    assert known.state(worker) == "warm"
    assert known.prefixes.matched(BLOCKS).blocks == {"a": 5}
    assert known.prefixes.status("a", known.now) == {
        "state": "warm", "blocks": 5, "refused": 0, "since_s": 0.0
    }  # fmt: skip
    assert value("pullfill_prefix_index_blocks") == 5
    assert value("pullfill_prefix_events_total") == told + 5


async def test_a_lost_worker_is_forgotten_and_comes_back_cold(known: Known) -> None:
    worker = Worker("a")
    worker.ring.append(Op.STORE, BLOCKS)
    known.follow(worker)
    known.answer(worker)
    known.prefixes.forget(worker, known.now)  # type: ignore[arg-type]
    assert (known.state(worker), known.prefixes.matched(BLOCKS).blocks) == ("none", {})
    known.answer(worker)  # what was still on its way
    assert known.prefixes.matched(BLOCKS).blocks == {}
    again = Worker("a")
    known.follow(again)
    assert known.state(again) == "cold"
    known.answer(again)
    assert known.prefixes.status("a", known.now)["blocks"] == 0


async def test_events_that_stay_away_are_asked_for_again_and_told(known: Known) -> None:
    worker = Worker("a")
    known.follow(worker)
    for _ in range(30):
        known.now += 1.0
        known.prefixes.tick(known.now)
        missing = known.now - 100 > 10.0
        assert bool(known.prefixes.troubles(known.now)) is missing
        assert value("pullfill_prefix_missing_workers") == missing
    assert 8 <= len(worker.asked) <= 16
    assert "are not known here for 30 s" in known.prefixes.status("a", known.now)["trouble"]
    known.answer(worker)
    known.prefixes.tick(known.now)
    assert value("pullfill_prefix_missing_workers") == 0
    asked = len(worker.asked)
    for _ in range(30):
        known.now += 1.0
        known.prefixes.tick(known.now)
    assert (len(worker.asked), dict(known.prefixes.troubles(known.now))) == (asked, {})


async def test_a_worker_that_cannot_tell_its_blocks_is_told_at_once(known: Known) -> None:
    worker = Worker("a", block_size=0, missing="this release tells no token_ids")
    known.follow(worker)
    known.prefixes.tick(known.now)
    assert worker.asked == []
    assert "this release tells no token_ids" in known.prefixes.status("a", known.now)["trouble"]
    assert value("pullfill_prefix_missing_workers") == 1
    known.prefixes.forget(worker, known.now)  # type: ignore[arg-type]
    assert dict(known.prefixes.troubles(known.now)) == {}


async def test_blocks_beyond_the_bound_are_refused_and_no_trouble() -> None:
    known, worker = Known(max_blocks=3), Worker("a")
    worker.ring.append(Op.STORE, BLOCKS)
    known.follow(worker)
    known.answer(worker)
    assert known.state(worker) == "warm"
    told = known.prefixes.status("a", known.now)
    assert (told["blocks"], told["refused"]) == (3, 2)
    assert known.prefixes.matched(BLOCKS).blocks == {"a": 3}


@pytest.mark.parametrize(
    "payload",
    [b"", b"\x93", wire.encode(PrefixFollow()),
     wire.encode(wire.prefix.PrefixEvents(epoch=1, first=0, ops=b"\x01", hashes=b""))],
)  # fmt: skip
async def test_what_no_worker_sends_is_a_bad_message(known: Known, payload: bytes) -> None:
    worker = Worker("a")
    known.follow(worker)
    with pytest.raises(BadMessage):
        known.prefixes.take(worker, payload, known.now)  # type: ignore[arg-type]
