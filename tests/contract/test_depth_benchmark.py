"""The benchmark of decisions beside thousands of waiting jobs runs, on a real NATS."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from benchmarks.control import depth
from tests.support.nats import NatsServer


def test_a_round_decides_stores_and_takes_back_every_job(nats: NatsServer) -> None:
    plant: Any = SimpleNamespace(nats=nats.url)
    rows = {row.metric: row for row in depth.run(plant, 1, many=60)}
    assert rows["a decision with 60 jobs open"].value > 0
    assert rows["a job from its decision until it is stored, with 60 open"].value > 0
