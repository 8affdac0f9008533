"""The arithmetic of bench_runs. The simulation itself needs vLLM."""

from __future__ import annotations

import pytest

from benchmarks import bench_runs
from benchmarks.bench_runs import BLOCK, Hour


def test_requests_come_in_order_and_conversations_go_on() -> None:
    found = list(bench_runs.asks(rate=2.0, seconds=300.0, seed=1))
    assert 450 < len(found) < 750
    assert [ask.at for ask in found] == sorted(ask.at for ask in found)
    begun: dict[bytes, int] = {}
    again = 0
    for ask in found:
        assert len(ask.names) == len(set(ask.names)) >= (ask.prompt + ask.answer) // BLOCK
        if ask.names:
            again += begun.get(ask.names[0], 0) > 0
            begun[ask.names[0]] = begun.get(ask.names[0], 0) + 1
    assert 0.5 < again / len(found) < 0.7, "six in ten"


def test_a_speed_lies_between_those_of_the_sizes_around() -> None:
    by_size = {16: 4.0, 64: 8.0, 1024: 10.0}
    assert bench_runs.speed(by_size, 64) == 8.0
    assert bench_runs.speed(by_size, 32) == pytest.approx(6.0)
    assert (bench_runs.speed(by_size, 1), bench_runs.speed(by_size, 1 << 20)) == (4.0, 10.0)


def test_every_transport_that_is_measured_has_a_row() -> None:
    assert set(bench_runs.speeds("transfer.json")) == {"shm", "tcp", "nixl"}
    hours = [Hour(prompts=1, blocks=10, runs=5, decode_runs=2)]
    rows = bench_runs.rows_of({"vllm": hours, "sorted": hours}, 1.0)
    assert rows[0].value == 2.0
    assert sum(one.metric.endswith("write block by block") for one in rows) == 3
