"""The frontend's balancer: which decode worker gets the next request."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from pullfill import wire
from pullfill.engine import front_wire
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
PROMPT = list(range(7, 7 + 20 * BLOCK + 5))


class Worker:
    """A connection to a decode worker whose blocks can be followed."""

    def __init__(self, name: str, block_size: int = BLOCK) -> None:
        self.instance_id = name
        self.record = SimpleNamespace(control=f"tcp://{name}:1")
        self.ring = Ring(1000)
        self.load: front_wire.LoadReport | None = None
        self._asked: list[PrefixFollow] = []
        self.welcome = front_wire.DecodeWelcome(
            decode_instance=name, vllm_version="0.32.0", max_model_len=1, num_gpu_blocks=1,
            block_size=16, supported_tasks=[], prefix_block_size=block_size,
        )  # fmt: skip

    def send(self, kind: bytes, payload: bytes) -> None:
        self._asked.append(wire.decode(payload, PrefixFollow))

    def tell(self, prefixes: Prefixes) -> None:
        """Bring the frontend up to date."""
        worker: Any = self
        prefixes.follow(worker, 0.0)
        for message in self.ring.answer(self._asked[-1]):
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


def counted(policy: str, reason: str) -> float:
    labels = {"policy": policy, "reason": reason}
    return REGISTRY.get_sample_value("pullfill_decode_choice_total", labels) or 0.0


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
