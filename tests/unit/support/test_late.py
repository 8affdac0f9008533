"""Large modules are imported by the tests that use them, not by reading the tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.late import READ_WITH_TESTS, Late

ROOT = Path(__file__).resolve().parents[3]


def test_reading_unit_and_contract_tests_imports_no_large_module(
    request: pytest.FixtureRequest,
) -> None:
    """`make test-fast` would pay for the import before it forks: vLLM takes five seconds."""
    folders = {item.path.relative_to(ROOT).parts[:2] for item in request.session.items}
    if folders - {("tests", "unit"), ("tests", "contract"), ("benchmarks", "tests")}:
        pytest.skip("tests of other folders were read too")
    assert request.config.stash[READ_WITH_TESTS] == []


def test_a_late_module_is_imported_by_its_first_use() -> None:
    name = "wsgiref.headers"
    sys.modules.pop(name, None)
    headers: Any = Late(name)
    assert not hasattr(headers, "__wrapped__")
    assert not hasattr(headers, "_mock_name"), "asked by pytest of every global of a test file"
    assert name not in sys.modules
    assert headers.Headers([("a", "b")])["a"] == "b"
    assert name in sys.modules
