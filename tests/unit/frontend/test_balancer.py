"""The frontend's balancer, and what it knows of the blocks of decode workers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from pullfill import wire
from pullfill.engine import front_wire
from pullfill.frontend.flight import Flight
from pullfill.frontend.request_log import RequestRecord
from pullfill.frontend.routing.balancer import Balancer, hashes_of
from pullfill.frontend.routing.choice import KNOWN
from pullfill.frontend.routing.prefixes import Prefixes
from pullfill.prefix.events import Original
from pullfill.wire import DecodeChoice, DecodePolicy, PrefixHolder, RouterConfig
from pullfill.wire.prefix import Op, PrefixFollow
from tests.support.fake_vllm import request
from tests.support.said import blank

BLOCK = 16
PROMPT = list(range(7, 7 + 20 * BLOCK + 5))


class Worker:
    """A connection to a decode worker whose blocks can be followed."""

    def __init__(self, name: str) -> None:
        self.instance_id = name
        self.record = SimpleNamespace(control=f"tcp://{name}:1")
        self.original = Original()
        self.asked: list[PrefixFollow] = []
        self.welcome = SimpleNamespace(prefix_block_size=BLOCK)

    def send(self, kind: bytes, payload: bytes) -> None:
        assert kind == front_wire.FOLW
        self.asked.append(wire.decode(payload, PrefixFollow))


class Rig:
    """A balancer with workers a, b, c and what it knows of their blocks."""

    def __init__(self) -> None:
        self.policy = DecodePolicy.KV
        self.now = 100.0
        self.prefixes = Prefixes(1000)
        self.workers: Any = [Worker(name) for name in "abc"]
        self.min_fetch = 0
        self.balancer = Balancer(
            lambda: RouterConfig(decode_policy=self.policy, min_fetch_tokens=self.min_fetch),
            self.prefixes,
        )

    def answer(self, worker: Any) -> None:
        """Send what the worker was asked for."""
        for message in worker.original.snapshot():
            self.prefixes.take(worker, wire.encode(message), self.now)

    def holds(self, **prompts: Any) -> None:
        """These workers hold the blocks of these requests; all others nothing."""
        for worker in self.workers:
            if (asked := prompts.get(worker.instance_id)) is not None:
                worker.original.append(Op.STORE, hashes_of(asked, (), BLOCK))
            self.prefixes.follow(worker, self.now)
            self.answer(worker)

    def choose(self, asked: Any) -> tuple[Flight, str, DecodeChoice]:
        """Returns also the chosen worker, and what is told of the choice."""
        flight = Flight(asked, asked.request_id, RequestRecord(""), "")
        worker = self.balancer.choose(flight, self.workers, self.now)
        assert flight.record.decode_choice is not None
        return flight, worker.instance_id, flight.record.decode_choice

    def worker_of(self, asked: Any) -> str:
        return self.choose(asked)[1]

    def holder(self, asked: Any, worker: int) -> PrefixHolder | None:
        return self.balancer.holder(self.choose(asked)[0], self.workers[worker])


@pytest.fixture
async def rig() -> Rig:
    return Rig()


async def test_what_workers_report_decides_how_many_get_streams(rig: Rig) -> None:
    rig.policy = DecodePolicy.PACK

    def where(streams: int, now: float) -> set[str]:
        for worker in rig.workers:
            load = blank(
                front_wire.LoadReport, active_blocks=9, free_blocks=99, requests=streams,
                streams=streams, prompt_share=0.01, step_s=(0.006, 0.0003, 0.0),
            )  # fmt: skip
            rig.balancer.report(worker.instance_id, load, (), now)
        rig.now = now
        return {rig.worker_of(request(f"r{n}", PROMPT[n + streams :])) for n in range(4)}

    assert where(1, rig.now) == {"a"}
    assert where(100, rig.now + 1.0) - {"a"} == {"b", "c"}


def test_not_every_report_looks_at_all_workers(rig: Rig) -> None:
    """1,000 workers send 20,000 of them in a second."""
    rig.policy = DecodePolicy.PACK
    looked, load = [], blank(front_wire.LoadReport)

    class Workers(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            looked.append(rig.now)
            return super().__iter__()

    for number in range(100):
        rig.now = 100.0 + number / 100
        rig.balancer.report("a", load, Workers(rig.workers), rig.now)
    assert 4 <= len(looked) <= 6


def test_which_blocks_of_a_prompt_can_be_matched() -> None:
    """Text before an image, tokens of the answer that are out, and nothing that is not cached."""
    text, image, embeds, skips, salted, adapted = (request("r", PROMPT) for _ in range(6))
    image.mm_features = [
        SimpleNamespace(mm_position=SimpleNamespace(offset=at)) for at in (200, 70)
    ]
    embeds.prompt_embeds = b"x"
    skips.sampling_params.skip_reading_prefix_cache = True
    whole = hashes_of(text, (), BLOCK)
    assert len(whole) == 20
    assert hashes_of(image, (), BLOCK) == whole[:4]
    assert hashes_of(request("t", PROMPT[:100]), PROMPT[100:], BLOCK) == whole
    for nothing in (embeds, skips, request("n", [])):
        assert hashes_of(nothing, (), BLOCK) == []
    salted.cache_salt, adapted.lora_request = "s", SimpleNamespace(lora_name="l")
    others = [*hashes_of(salted, (), BLOCK), *hashes_of(adapted, (), BLOCK)]
    assert len({*whole, *others}) == 60, "salt and adapter make other blocks"


@pytest.mark.parametrize("policy", [DecodePolicy.KV, DecodePolicy.ROUND_ROBIN])
async def test_the_worker_that_holds_most_is_named(rig: Rig, policy: DecodePolicy) -> None:
    rig.policy = policy
    rig.min_fetch = 2 * BLOCK
    rig.holds(a=request("x", PROMPT[: 4 * BLOCK]), b=request("x", PROMPT[: 9 * BLOCK]))
    asked = request("r", PROMPT)
    expected = PrefixHolder(instance_id="b", control="tcp://b:1", tokens=9 * BLOCK)
    assert [rig.holder(asked, worker) for worker in range(3)] == [expected, None, expected]


async def test_what_the_chosen_worker_holds_counts_although_many_hold_more(rig: Rig) -> None:
    rig.workers = [Worker(f"w{n}") for n in range(KNOWN + 2)]
    rig.min_fetch = 2 * BLOCK
    most, least = request("x", PROMPT[: 9 * BLOCK]), request("y", PROMPT[: 8 * BLOCK])
    rig.holds(w0=least, **{w.instance_id: most for w in rig.workers[1:]})
    assert rig.holder(request("r", PROMPT), 0) is None
    assert {rig.holder(request(f"r{n}", PROMPT), 9) for n in range(20)} == {None}


async def test_nobody_is_named_who_holds_hardly_more(rig: Rig) -> None:
    rig.holds(a=request("x", PROMPT[: 4 * BLOCK]), b=request("x", PROMPT[: 5 * BLOCK]))
    rig.min_fetch = 2 * BLOCK
    assert rig.holder(request("r", PROMPT), 0) is None
    assert rig.holder(request("r2", PROMPT[: 2 * BLOCK]), 2) is None, "too short"
    rig.min_fetch = 0
    assert rig.holder(request("r3", PROMPT), 2) is None, "switched off"


async def test_events_that_stay_away_are_asked_for_again_and_told(rig: Rig) -> None:
    def missing_workers() -> float | None:
        return REGISTRY.get_sample_value("pullfill_prefix_missing_workers")

    worker, prefixes = rig.workers[0], rig.prefixes
    prefixes.follow(worker, rig.now)
    for _ in range(30):
        rig.now += 1.0
        prefixes.tick(rig.now)
        missing = rig.now - 100 > 10.0
        assert bool(prefixes.troubles(rig.now)) is missing
        assert missing_workers() == missing
    assert 8 <= len(worker.asked) <= 16
    assert "are not known here for 30 s" in prefixes.status("a", rig.now)["trouble"]
    rig.answer(worker)
    asked = len(worker.asked)
    for _ in range(30):
        rig.now += 1.0
        prefixes.tick(rig.now)
        assert missing_workers() == 0
    assert (len(worker.asked), prefixes.troubles(rig.now)) == (asked, {})
