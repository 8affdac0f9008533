"""What the benchmarks print and write, and the measuring itself, without a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import bench_cluster, machine, report

SPIN = """
import time
while time.process_time() < {}:
    pass
print(flush=True)
input()
"""


class TestRows:
    def test_limits_are_kept_inclusive(self) -> None:
        assert report.row("m", 5.0, "ms", 5.0).ok
        missed = report.row("m", 5.1, "ms", 5.0)
        assert not missed.ok
        assert missed.target == "<= 5"
        assert report.row("m", 1e9, "ms").ok

    def test_a_peer_is_compared_by_ratio(self) -> None:
        close = report.versus("m", 110.0, "us", "peer", 100.0, 1.1)
        assert (close.ok, close.ratio, close.target) == (True, 1.1, "ratio <= 1.1")
        assert not report.versus("m", 111.0, "us", "peer", 100.0, 1.1).ok

    def test_rounding_never_turns_a_miss_into_a_hit(self) -> None:
        missed = report.row("m", 5.00001, "ms", 5.0)
        assert (missed.value, missed.ok) == (5.0, False)

    @pytest.mark.parametrize(
        ("values", "share", "expected"),
        [([3.0], 0.99, 3.0), ([1, 2, 3, 4], 0.5, 2.5), ([4, 1, 3, 2], 1.0, 4), ([2, 1], 0.0, 1)],
    )
    def test_percentile(self, values: list[float], share: float, expected: float) -> None:
        assert report.percentile(values, share) == expected


class TestFiles:
    ROWS = (report.row("plain", 1.5, "s"), report.versus("much", 3.0, "us", "other", 2.0, 1.1))

    def test_what_was_not_quiet_replaces_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(report, "RESULTS", tmp_path)
        assert report.finish("it", list(self.ROWS), quiet=True, save=True, title="It") == 1
        text = (tmp_path / "it.md").read_text()
        assert "| much | 3 | us | other | 2 | 1.5 | ratio <= 1.1 | NO |" in text
        assert "| plain | 1.5 | s |  |  |  |  |  |" in text
        fine = [self.ROWS[0], report.missing("m", "NIXL", "not installed")]
        assert report.finish("it", fine, quiet=True, save=True, title="It") == 0
        before = (tmp_path / "it.md").read_text()
        assert report.finish("it", fine * 2, quiet=False, save=True, title="It") == 1
        assert (tmp_path / "it.md").read_text() == before
        busy = {"quiet": False, "save": True, "title": "It", "even_if_busy": True}
        assert report.finish("it", fine * 2, **busy) == 0
        assert "NOT quiet" in (tmp_path / "it.md").read_text()


class TestCpuClock:
    def test_it_counts_what_another_process_used(self) -> None:
        command = [sys.executable, "-c", SPIN.format(0.2)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            spent = machine.cpu_seconds(child.pid)
            assert spent >= 0.2
            assert machine.total_cpu_seconds([child.pid]) >= spent
            assert child.pid in machine.tree([os.getpid()])
            used = machine.memory(child.pid)
            assert 0 <= used.shared < used.rss <= used.peak
            child.communicate(b"\n")
        with pytest.raises(OSError, match="Invalid argument"):
            machine.cpu_seconds(child.pid)
        assert machine.total_cpu_seconds([child.pid]) == 0.0


class TestQuiet:
    def test_what_is_expected_is_nobody_else(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = {"busy": 10.0, "own": 4.0}
        monkeypatch.setattr(machine, "_busy_seconds", lambda: clock["busy"])
        monkeypatch.setattr(machine, "total_cpu_seconds", lambda _: clock["own"])
        quiet = machine.OtherLoad()
        with quiet.window([1]):
            clock.update(busy=11.0, own=5.0)
            time.sleep(0.01)
        assert quiet.quiet
        with quiet.window([1]):
            clock.update(busy=12.0, own=5.1)
            time.sleep(0.01)
        assert not quiet.quiet


class TestHandoffRows:
    @staticmethod
    def record(queue: float, *, path: str = "remote", hit: int = 0) -> dict[str, object]:
        timings: dict[str, float | None] = dict.fromkeys(bench_cluster.STAGES, 1.0)
        timings["queue"] = queue
        timings["prefix_read"] = 9.0 if hit else 0.0
        return {"path": path, "prefix_hit_tokens": hit, "timings_ms": timings}

    def rows(self, *records: dict[str, object]) -> dict[str, report.Row]:
        return {row.metric: row for row in bench_cluster.handoff_rows(list(records))}

    def test_the_median_is_held_against_the_target(self) -> None:
        rows = self.rows(self.record(4.0), self.record(5.0), self.record(90.0))
        name = bench_cluster.STAGES["queue"][0]
        assert rows[f"{name}, p50"].value == 5.0
        assert rows[f"{name}, p50"].ok
        assert rows[f"{name}, p99"].value > 80
        assert not self.rows(self.record(5.2))[f"{name}, p50"].ok

    def test_a_local_request_is_a_miss_and_not_measured(self) -> None:
        rows = self.rows(self.record(4.0), self.record(99.0, path="local"))
        assert not rows["requests prefilled remotely"].ok
        assert rows[f"{bench_cluster.STAGES['queue'][0]}, p99"].value == 4.0

    def test_only_requests_with_a_prefix_tell_of_reads(self) -> None:
        rows = self.rows(self.record(1.0), self.record(1.0, hit=64))
        assert rows[f"{bench_cluster.STAGES['prefix_read'][0]}, p50"].value == 9.0
