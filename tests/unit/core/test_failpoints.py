"""Failpoints: what arms one, and on which hit it fires."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pullfill.runtime import failpoints


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def test_error_on_the_nth_hit_only() -> None:
    failpoints.arm("a.b=error:boom@2; c=sleep:0")
    failpoints.hit("a.b")
    with pytest.raises(failpoints.FailpointError, match="boom"):
        failpoints.hit("a.b")
    failpoints.hit("a.b")
    failpoints.hit("c")
    failpoints.hit("unknown")


def test_a_file_is_read_again_when_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "points"
    failpoints.arm(f"@{path}")
    failpoints.hit("a")
    for _ in range(2):  # the second time the hits are counted from the start
        other = tmp_path / "new"
        other.write_text("a=error:boom@2")
        other.replace(path)
        failpoints.hit("a")
        with pytest.raises(failpoints.FailpointError, match="boom"):
            failpoints.hit("a")
    path.unlink()
    failpoints.hit("a")
    failpoints.hit("a")
