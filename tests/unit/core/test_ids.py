"""Identifiers: new ones differ, and all of them are names."""

from __future__ import annotations

import pytest

from pullfill import ids


def test_new_ones_differ_and_are_names() -> None:
    made = {ids.new_instance_id("decode") for _ in range(50)}
    made |= {ids.new_incarnation() for _ in range(50)} | {ids.new_job_id() for _ in range(50)}
    assert len(made) == 150
    assert all(ids.is_name(name) for name in made)


@pytest.mark.parametrize("name", ["a", "default", "a-b_c9", "a" * 63])
def test_names(name: str) -> None:
    assert ids.is_name(name)


@pytest.mark.parametrize("name", ["", "A", "a.b", "a/b", "-a", "a b", "a\n", "a" * 64, "é"])
def test_not_names(name: str) -> None:
    assert not ids.is_name(name)
