"""Each row of the fault matrix in docs/failure-modes.md has a fault test with its number. Each
promise of docs/promises.md has the one test that owns it, with the mark `essential`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = sorted({*range(1, 30)} - {24})  # 24 is retired
ESSENTIAL = "pytest.mark.essential"
_PROMISE = re.compile(r"^(?:(\d+) \| )?[^|]+ \| `(tests/[\w/]+\.py::\w+)`$", re.M)


def functions_in(text: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@cache
def fault_tests() -> dict[int, set[str]]:
    """`file::name` of every test function in tests/chaos, by the row in its name."""
    found: dict[int, set[str]] = {}
    for path in sorted((ROOT / "tests/chaos").glob("test_*.py")):
        for node in functions_in(path.read_text()):
            match = re.match(r"test_row_(\d+)_", node.name)
            if match:
                found.setdefault(int(match[1]), set()).add(f"tests/chaos/{path.name}::{node.name}")
    return found


@cache
def promises() -> list[tuple[str, str]]:
    """Row of the fault matrix, or empty, and owning test of each line of docs/promises.md."""
    return _PROMISE.findall((ROOT / "docs/promises.md").read_text())


def test_every_line_of_the_promises_has_an_owner() -> None:
    lines = (ROOT / "docs/promises.md").read_text().splitlines()
    rows = [line for line in lines if " | " in line]
    heads = [line for line in rows if line.endswith(("owner", "---"))]
    assert len(rows) - len(heads) == len(promises()) > 100


def test_promises_and_essential_tests_are_the_same() -> None:
    owners = [owner for _, owner in promises()]
    marked = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        text, found = path.read_text(), 0
        if ESSENTIAL not in text or path == Path(__file__):
            continue
        for node in functions_in(text):
            if ESSENTIAL in map(ast.unparse, node.decorator_list):
                marked.add(f"{path.relative_to(ROOT)}::{node.name}")
                found += 1
        assert text.count(ESSENTIAL) == found, f"{path}: the mark is for test functions only"
    assert sorted(owners) == sorted(set(owners)), "a test owns two promises"
    assert marked - set(owners) == set(), "marked, and without a line in docs/promises.md"
    assert set(owners) - marked == set(), "in docs/promises.md, and not there or without the mark"


def test_each_row_of_the_matrix_is_promised_and_owned_by_a_test_with_its_number() -> None:
    owned = [(int(row), owner) for row, owner in promises() if row]
    assert {row for row, _ in owned} == set(ROWS)
    assert [(r, o) for r, o in owned if o not in fault_tests()[r]] == []


def test_there_are_no_other_rows() -> None:
    text = (ROOT / "docs/failure-modes.md").read_text()
    assert [int(row) for row in re.findall(r"^\| (\d+) \|", text, re.M)] == ROWS
    assert fault_tests().keys() == set(ROWS)
