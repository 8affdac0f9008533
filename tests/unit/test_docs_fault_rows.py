"""Each row of the fault matrix in docs/failure-modes.md has a fault test with its number."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = range(1, 30)
LONG = "pytest.mark.long"
_NAMED = re.compile(r"tests/chaos/(\w+\.py)::test_row_(\d+)_(\w+)")


@cache
def fault_tests() -> dict[int, set[str]]:
    """`file::name` of every test function in tests/chaos, by the row in its name."""
    found: dict[int, set[str]] = {}
    for path in sorted((ROOT / "tests/chaos").glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                match = re.match(r"test_row_(\d+)_", node.name)
                if match:
                    found.setdefault(int(match[1]), set()).add(f"{path.name}::{node.name}")
    return found


@cache
def documented() -> dict[int, set[str]]:
    """The same, as the table of faults names them."""
    text = (ROOT / "docs/failure-modes.md").read_text()
    rows = {int(m[1]): m[0] for m in re.finditer(r"^\| (\d+) \|.*$", text, re.MULTILINE)}
    return {
        row: {f"{file}::test_row_{n}_{rest}" for file, n, rest in _NAMED.findall(line)}
        for row, line in rows.items()
    }


@pytest.mark.parametrize("row", ROWS)
def test_the_row_names_its_fault_tests(row: int) -> None:
    own = fault_tests().get(row, set())
    assert own, f"no test in tests/chaos is named test_row_{row}_…"
    named = documented()[row]
    assert named & own, f"docs/failure-modes.md names none of {sorted(own)} in row {row}"
    assert named <= own, "another row's test, or none"


def test_the_rows_that_only_make_chaos_runs_are_told() -> None:
    short = set()
    for path in (ROOT / "tests/chaos").glob("test_*.py"):
        body = ast.parse(path.read_text()).body
        if any(isinstance(node, ast.Assign) and LONG in ast.unparse(node) for node in body):
            continue
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                match = re.match(r"test_row_(\d+)_", node.name)
                if match and LONG not in map(ast.unparse, node.decorator_list):
                    short.add(int(match[1]))
    text = " ".join((ROOT / "docs/failure-modes.md").read_text().split())
    told = re.search(r"`make test` all but rows ([\d, and]+)\.", text)
    assert told is not None
    assert {int(row) for row in re.findall(r"\d+", told[1])} == set(ROWS) - short


def test_there_are_no_other_rows() -> None:
    assert sorted(documented()) == list(ROWS)
    assert fault_tests().keys() <= set(ROWS)
