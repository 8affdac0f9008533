"""What the benchmarks print and write, and the measuring itself, without a cluster."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks import machine, report


class TestRows:
    def test_rounding_never_turns_a_miss_into_a_hit(self) -> None:
        missed = report.row("m", 5.00001, "ms", 5.0)
        assert (missed.value, missed.ok) == (5.0, False)


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
