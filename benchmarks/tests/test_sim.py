"""The simulation of local or remote: what it simulates, and that its result is no accident."""

from __future__ import annotations

import pytest

from benchmarks import sim
from benchmarks.sim import COST
from benchmarks.sim_sides import Options


def conditional(threshold: int) -> Options:
    return Options("conditional", threshold=threshold, seats=sim.SEATS)


def workload(name: str) -> sim.Workload:
    return next(one for one in sim.WORKLOADS if one.name == name)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim, "SECONDS", 30.0)


def test_documents_need_both_workers() -> None:
    """Without `cost`, a threshold keeps all of them away from one of the two."""
    good = {
        name: sim.run(workload("documents"), options, 1).good
        for name, options in (("cost", COST), ("away", conditional(0)))
    }
    assert good["cost"] > good["away"]


def test_a_prefill_beside_streams_breaks_their_target_without_chunks() -> None:
    chat = workload("chat")
    local = sim.run(chat, conditional(4096), 1).good
    assert local < 0.7 < sim.run(chat, COST, 1).good
