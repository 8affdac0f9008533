"""A minute of `make soak`: mixed faults at random moments while answers are streamed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos_soak import command_line, soak

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.long]


@pytest.mark.timeout(900)
def test_a_minute_of_mixed_faults(tmp_path: Path) -> None:
    """Nothing failed, wrong, left behind or still mapped."""
    options = command_line().parse_args(["--minutes", "1", "--every", "6"])
    rows = soak(options, tmp_path)
    assert [r for r in rows if not r.ok] == []
    assert sum(r.value for r in rows if r.metric.startswith("fault: ")) >= 3
