"""The control benchmark's own arithmetic: whose CPU it is, and what a row says."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import bench_control as bench
from benchmarks.control import duel, plant, probes
from benchmarks.control.plant import Use, mock_flags
from pullfill.decode_worker import scheduler as decode
from pullfill.demo.checkpoint import ensure_demo_model
from pullfill.deploy import plan as deploy_plan
from pullfill.prefill_worker import scheduler as prefill
from pullfill.testing.mock_model import settings_of


class Clock:
    """A thread's CPU clock that moves only when told."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0
        patch.setattr(probes, "_clock", lambda: self.now)

    def work(self, ns: int) -> None:
        self.now += ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_our_part_of_an_engine_step_is_not_the_engines(clock: Clock) -> None:
    counters = probes.Counters()
    request = object()

    class Side:
        def decide(self, request: Any, hit: int) -> None:
            clock.work(30)

        def enqueue(self, request: Any, blocks: Any, external: int) -> None:
            clock.work(5)

    decide = counters.side(Side.decide)
    enqueue = counters.side(Side.enqueue)

    def step() -> None:
        clock.work(100)
        decide(Side(), request, 0)
        decide(Side(), request, 0)  # asked again
        clock.work(10)
        enqueue(Side(), request, (), 7)

    counters.engine(step, counts=True)()
    assert (counters.engine_ns, counters.side_ns, counters.steps) == (110, 65, 1)


@pytest.mark.parametrize(
    ("scheduler", "calls"),
    [
        (decode.DecodeScheduler, probes.DECODE_CALLS),
        (prefill.PrefillScheduler, probes.PREFILL_CALLS),
    ],
)
def test_what_is_timed_exists(scheduler: Any, calls: tuple[str, ...]) -> None:
    assert [name for name in calls if not hasattr(scheduler, name)] == []


def test_threads_are_told_by_name() -> None:
    time.sleep(0.001)
    used = probes._threads()
    assert used["loop"] > 0, "the main thread"


def size(remote: int = 40, cpu: float = 0.01, failed: int = 0) -> bench.Size:
    use = {role: Use(total=cpu, engine=0.004 if role == "decode" else 0.0) for role in bench.ROLES}
    return bench.Size(
        workers=2, ready_s=1.0, idle=dict.fromkeys(bench.ROLES, 0.006),
        stages={"queue": [1.0, 2.0, 3.0]}, paced=use, paced_requests=10, use=use, requests=10,
        full=use, full_requests=20, loop_s=0.5, remote=remote, failed=failed, rss_mb=100.0,
    )  # fmt: skip


def test_engines_do_not_count_and_all_must_be_remote() -> None:
    rows = {row.metric.removeprefix("2+2 workers: "): row for row in bench.rows_of(size())}
    assert rows["CPU per request beside engines"].value == pytest.approx(4.6)
    assert rows["queue p50"].value == 2.0
    assert rows["the same with as many requests for each worker"].value == pytest.approx(2.3)
    assert rows["of it idling"].value == pytest.approx(1.0)  # 5 times 0.6 % of a core, at 30/s
    assert rows["requests prefilled remotely"].ok
    rows = {row.metric.removeprefix("2+2 workers: "): row for row in bench.rows_of(size(39, 0.003))}
    assert not rows["requests prefilled remotely"].ok
    rows = {row.metric.removeprefix("2+2 workers: "): row for row in bench.rows_of(size(failed=1))}
    assert not rows["requests failed"].ok


def test_mock_flags_are_what_the_backend_reads() -> None:
    kv, config = mock_flags(1 << 20, step_s=0.01)
    assert kv == "--kv-cache-memory-bytes=1048576"

    assert settings_of(json.loads(config.partition("=")[2])).step_s == 0.01


def test_workers_of_a_fleet_start_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once would starve etcd, and workers would lose their leases. So a group starts when
    the one before it is registered."""
    at_once: list[int] = []

    class Slow:
        base = Path("/nowhere")
        forked = known = 0

        def fork(self, role: str, namespace: str, **_: Any) -> int:
            self.forked += role != "driver"
            at_once.append(self.forked - self.known)
            return self.forked

        def registered(self, namespace: str) -> int:
            self.known += self.forked > self.known  # one each time it is asked
            if self.known == 3:
                raise OSError("etcd is busy")
            return self.known

    driver = SimpleNamespace(do=lambda what, **args: None)
    monkeypatch.setattr(plant, "Driver", lambda path: driver)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    slow: Any = Slow()
    fleet = plant.Fleet(slow, "ns", 30, 10, decode_flags=[], prefill_flags=[], router={})
    assert fleet.decode + fleet.prefill == list(range(1, 41))
    assert slow.known == 40
    assert max(at_once) == plant.AT_ONCE


def test_wake_ups_of_a_process_are_counted() -> None:
    before = duel.wakeups([os.getpid()])
    for _ in range(3):
        time.sleep(0.001)
    assert duel.wakeups([os.getpid()]) >= before + 3


def test_a_warm_up_ends_within_the_drivers_limit() -> None:
    assert duel.warm_up(1) == [41]
    assert duel.warm_up(16) == [424]
    assert sum(duel.warm_up(64)) > 3 * 64**2 / 2
    assert max(duel.warm_up(64)) == duel.PORTION


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_fleet_serves_both_turns_of_a_conversation_at_one_worker(tmp_path: Path) -> None:
    """What `duel` and `make bench-control` start: all is real but the model."""
    ensure_demo_model(deploy_plan.demo_directory())
    with plant.plant(tmp_path) as servers:
        fleet = plant.Fleet(
            servers, "test", 2, 1, decode_flags=mock_flags(), prefill_flags=mock_flags(), router={}
        )
        try:
            with fleet.window() as used:
                done = fleet.driver.do("load", conversations=8, at_once=4, seed=1)
        finally:
            fleet.close()
    assert (done["failed"], done["remote"], done["requests"]) == (0, 16, 16)
    assert len(done["stages"]["prefix_read"]) == 8, "the second turn has a hit where the first was"
    assert used["decode"].engine > 0
    assert used["prefill"].steps >= 1
