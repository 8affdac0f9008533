"""Which blocks of vLLM's events count. Its real events: tests/integration/test_kv_events.py."""

from __future__ import annotations

from typing import Any

import pytest

from pullfill.engine.kv_events import Stored, origin


def stored(*keys: tuple[Any, ...] | None, first: bool = True, lora: str = "") -> Stored:
    handles = [bytes([i]) for i in range(len(keys))]
    return Stored(1, handles, None if first else b"parent", [7] * len(keys), lora, list(keys))


IMAGE = ("f3a9", 2)


@pytest.mark.parametrize(
    ("blocks", "salt", "count"),
    [
        (stored(None, None), "", 2),
        (Stored(1, [b"a", b"b"], None, [1, 2], "", None), "", 2),
        (stored(("pepper",), None), "pepper", 2),
        (stored(("a",), ("a",), lora="a"), "", 2),
        (stored(("a", "pepper"), ("a",), lora="a"), "pepper", 2),
        (stored(("a", "a"), ("a",), lora="a"), "a", 2),
        (stored(None, (IMAGE,), None), "", 1),
        (stored((IMAGE, "pepper"), None), "", 0),
        (stored(("a", IMAGE), lora="a"), "", 0),
        (stored((b"digest of embeddings",), None), "", 0),
        (stored(None, (b"digest of embeddings",)), "", 1),
        (stored(("no salt here",), first=False), "", 0),
        (stored(None, ("no salt here",)), "", 1),
        (stored(("a",), lora="b"), "a", 1),
    ],
)
def test_salt_and_blocks_that_depend_on_text_alone(blocks: Stored, salt: str, count: int) -> None:
    assert origin(blocks) == (salt, count)
