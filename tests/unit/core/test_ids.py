"""Identifiers: new ones differ, and all of them are names."""

from __future__ import annotations

import pytest

from pullfill import ids


@pytest.mark.parametrize("name", ["a", "default", "a-b_c9", "a" * 63])
def test_names(name: str) -> None:
    assert ids.is_name(name)


@pytest.mark.parametrize("name", ["", "A", "a.b", "a/b", "-a", "a b", "a\n", "a" * 64, "é"])
def test_not_names(name: str) -> None:
    assert not ids.is_name(name)
