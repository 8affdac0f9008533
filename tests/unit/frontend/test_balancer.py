"""The frontend's balancer: which decode worker gets the next request."""

from __future__ import annotations

from dataclasses import dataclass

from pullfill.frontend.balancer import RoundRobin


@dataclass
class Worker:
    instance_id: str


def test_round_robin_gives_each_worker_a_turn_and_keeps_its_place_when_one_leaves() -> None:
    router = RoundRobin()
    a, b, c = Worker("a"), Worker("b"), Worker("c")
    assert [router.choose(None, [c, a, b]).instance_id for _ in range(4)] == ["a", "b", "c", "a"]
    assert router.choose(None, [a, c]) is c
    assert router.choose(None, [a, c]) is a
