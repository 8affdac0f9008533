"""How the demo checkpoint comes to lie in its directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from pullfill.demo import checkpoint as demo
from pullfill.demo.recipe import Recipe

SMALL = Recipe(
    hidden=32, layers=1, heads=2, kv_heads=1, intermediate=32, vocab=268, max_positions=128
)


def test_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(OSError, match="not empty"):
        demo.ensure_demo_model(tmp_path, SMALL)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    assert not list(tmp_path.parent.glob("*.new"))
