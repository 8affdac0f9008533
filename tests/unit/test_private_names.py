"""Tests look at private attributes of other objects less and less."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A test that needs a private name breaks with each change inside. Each ceiling is the count of the
# day it was last lowered: lower it with the count, never raise it.
CEILINGS = {
    "tests/unit": 172,
    "tests/contract": 180,
    "tests/integration": 32,
    "tests/chaos": 4,
    "tests/support": 49,
    "benchmarks": 9,
}


def private_uses(path: Path) -> list[str]:
    """`file:line: name` of each `x._name` where x is not `self` or `cls`."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.attr}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]


@pytest.mark.parametrize("tree", CEILINGS)
def test_uses_of_private_attributes_may_only_fall(tree: str) -> None:
    found = [use for path in sorted((ROOT / tree).rglob("*.py")) for use in private_uses(path)]
    assert len(found) <= CEILINGS[tree], "use public names:\n" + "\n".join(found)


def test_only_attributes_of_others_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "x.py"
    path.write_text("self._a\ncls._b\nother.c._d\nother.__dict__\nmodule._e()\n")
    assert private_uses(path) == ["x.py:3: _d", "x.py:5: _e"]
