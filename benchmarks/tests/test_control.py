"""The control benchmark's own arithmetic: whose CPU it is, and what a row says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_control as bench
from benchmarks.control import plant, probes
from benchmarks.control.plant import Use, mock_flags
from pullfill.decode_worker import scheduler as decode
from pullfill.demo.checkpoint import ensure_demo_model
from pullfill.deploy import plan as deploy_plan
from pullfill.prefill_worker import scheduler as prefill


@pytest.mark.parametrize(
    ("scheduler", "calls"),
    [
        (decode.DecodeScheduler, probes.DECODE_CALLS),
        (prefill.PrefillScheduler, probes.PREFILL_CALLS),
    ],
)
def test_what_is_timed_exists(scheduler: Any, calls: tuple[str, ...]) -> None:
    assert [name for name in calls if not hasattr(scheduler, name)] == []


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
