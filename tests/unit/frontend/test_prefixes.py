"""What a frontend knows of the blocks of decode workers."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import REGISTRY

from pullfill import wire
from pullfill.engine import front_wire
from pullfill.errors import BadMessage
from pullfill.frontend.routing.prefixes import Prefixes
from pullfill.prefix.events import Ring
from pullfill.wire.prefix import Op, PrefixFollow

BLOCKS = range(1, 6)


class Worker:
    """A decode worker with a ring, and its connection."""

    def __init__(self, name: str, block_size: int = 16, missing: str = "") -> None:
        self.instance_id = name
        self.ring = Ring(1000)
        self.asked: list[PrefixFollow] = []
        self.welcome = front_wire.DecodeWelcome(
            decode_instance=name, vllm_version="0.32.0", max_model_len=1, num_gpu_blocks=1,
            block_size=16, supported_tasks=[], prefix_block_size=block_size,
            no_prefix_events=missing,
        )  # fmt: skip

    def send(self, kind: bytes, payload: bytes) -> None:
        assert kind == front_wire.FOLW
        self.asked.append(wire.decode(payload, PrefixFollow))


class Rig:
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


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


@pytest.fixture
async def rig() -> Rig:
    return Rig()


async def test_a_worker_is_cold_until_it_has_told_its_blocks(rig: Rig) -> None:
    worker = Worker("a", block_size=32)
    worker.ring.append(Op.STORE, BLOCKS)
    rig.follow(worker)
    assert rig.state(worker) == "cold"
    assert rig.prefixes.matched(BLOCKS).blocks == {}
    told = value("pullfill_prefix_events_total")
    rig.answer(worker)
    assert rig.state(worker) == "warm"
    assert rig.prefixes.matched(BLOCKS).blocks == {"a": 5}
    assert rig.prefixes.status("a", rig.now) == {
        "state": "warm", "blocks": 5, "refused": 0, "since_s": 0.0
    }  # fmt: skip
    assert value("pullfill_prefix_index_blocks") == 5
    assert value("pullfill_prefix_events_total") == told + 5


async def test_a_lost_worker_is_forgotten_and_comes_back_cold(rig: Rig) -> None:
    worker = Worker("a")
    worker.ring.append(Op.STORE, BLOCKS)
    rig.follow(worker)
    rig.answer(worker)
    rig.prefixes.forget(worker, rig.now)  # type: ignore[arg-type]
    assert (rig.state(worker), rig.prefixes.matched(BLOCKS).blocks) == ("none", {})
    rig.answer(worker)  # what was still on its way
    assert rig.prefixes.matched(BLOCKS).blocks == {}
    again = Worker("a")
    rig.follow(again)
    assert rig.state(again) == "cold"
    rig.answer(again)
    assert rig.prefixes.status("a", rig.now)["blocks"] == 0


async def test_events_that_stay_away_are_asked_for_again_and_told(rig: Rig) -> None:
    worker = Worker("a")
    rig.follow(worker)
    for _ in range(30):
        rig.now += 1.0
        rig.prefixes.tick(rig.now)
        missing = rig.now - 100 > 10.0
        assert bool(rig.prefixes.troubles(rig.now)) is missing
        assert value("pullfill_prefix_missing_workers") == missing
    assert 8 <= len(worker.asked) <= 16
    assert "are not known here for 30 s" in rig.prefixes.status("a", rig.now)["trouble"]
    rig.answer(worker)
    rig.prefixes.tick(rig.now)
    assert value("pullfill_prefix_missing_workers") == 0
    asked = len(worker.asked)
    for _ in range(30):
        rig.now += 1.0
        rig.prefixes.tick(rig.now)
    assert (len(worker.asked), dict(rig.prefixes.troubles(rig.now))) == (asked, {})


async def test_a_worker_that_cannot_tell_its_blocks_is_told_at_once(rig: Rig) -> None:
    worker = Worker("a", block_size=0, missing="this release tells no token_ids")
    rig.follow(worker)
    rig.prefixes.tick(rig.now)
    assert worker.asked == []
    assert "this release tells no token_ids" in rig.prefixes.status("a", rig.now)["trouble"]
    assert value("pullfill_prefix_missing_workers") == 1
    rig.prefixes.forget(worker, rig.now)  # type: ignore[arg-type]
    assert dict(rig.prefixes.troubles(rig.now)) == {}


async def test_blocks_beyond_the_bound_are_refused_and_no_trouble() -> None:
    rig, worker = Rig(max_blocks=3), Worker("a")
    worker.ring.append(Op.STORE, BLOCKS)
    rig.follow(worker)
    rig.answer(worker)
    assert rig.state(worker) == "warm"
    told = rig.prefixes.status("a", rig.now)
    assert (told["blocks"], told["refused"]) == (3, 2)
    assert rig.prefixes.matched(BLOCKS).blocks == {"a": 3}


@pytest.mark.parametrize(
    "payload",
    [b"", b"\x93", wire.encode(PrefixFollow()),
     wire.encode(wire.prefix.PrefixEvents(epoch=1, first=0, ops=b"\x01", hashes=b""))],
)  # fmt: skip
async def test_what_no_worker_sends_is_a_bad_message(rig: Rig, payload: bytes) -> None:
    worker = Worker("a")
    rig.follow(worker)
    with pytest.raises(BadMessage):
        rig.prefixes.take(worker, payload, rig.now)  # type: ignore[arg-type]
