"""Ranges of keys that share a prefix."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pullfill.registry.client import prefix_end


@given(st.binary(max_size=6), st.binary(max_size=6))
def test_prefix_end_bounds_exactly_the_prefixed_keys(prefix: bytes, key: bytes) -> None:
    end = prefix_end(prefix)
    inside = key >= prefix and (end == b"\0" or key < end)
    assert inside == key.startswith(prefix)
