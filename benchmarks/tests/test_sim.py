"""The simulation of local or remote: what it simulates, and that its result is no accident."""

from __future__ import annotations

import random

import pytest

from benchmarks import sim
from benchmarks.sim_engine import Setup
from pullfill.wire import RouterPolicy

CONDITIONAL, COST = RouterPolicy.CONDITIONAL, RouterPolicy.COST


def workload(name: str) -> sim.Workload:
    return next(one for one in sim.WORKLOADS if one.name == name)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim, "SECONDS", 30.0)


@pytest.mark.parametrize("name", [one.name for one in sim.WORKLOADS])
def test_every_request_is_answered(name: str) -> None:
    for setup, prefill in ((Setup(COST), 1), (Setup(CONDITIONAL, 256), 2), (Setup(None), 0)):
        asks: list[sim.Request] = []
        made = workload(name)

        def keep(rng: random.Random, made: sim.Workload = made) -> list[sim.Request]:
            asks.extend(made.asks(rng))  # noqa: B023
            return asks  # noqa: B023

        sim.run(sim.Workload(name, keep, made.slow), setup, 1, prefill=prefill)
        assert [ask for ask in asks if ask.made != ask.output] == []


def test_the_same_seed_gives_the_same_result() -> None:
    first, second = (sim.run(workload("bursts"), Setup(COST), 3) for _ in range(2))
    assert first == second


def test_documents_need_both_workers() -> None:
    """Without `cost`, a threshold keeps all of them away from one of the two."""
    good = {
        name: sim.run(workload("documents"), setup, 1).good
        for name, setup in (("cost", Setup(COST)), ("away", Setup(CONDITIONAL, 0)))
    }
    assert good["cost"] > good["away"]


def test_a_prefill_beside_streams_breaks_their_target_without_chunks() -> None:
    chat = workload("chat")
    local = sim.run(chat, Setup(CONDITIONAL, 4096), 1).good
    assert local < 0.7 < sim.run(chat, Setup(COST), 1).good
