"""Names of blocks."""

from __future__ import annotations

from array import array

import pytest

from pullfill.prefix.chain import extend, root

TOKENS = array("I", range(100)).tobytes()


@pytest.mark.parametrize("block_size", [1, 16, 17])
def test_a_block_is_named_by_all_tokens_up_to_its_end(block_size: int) -> None:
    seed = root(None, None, block_size)
    hashes = extend(seed, TOKENS, block_size)
    assert len(hashes) == 100 // block_size
    for block in range(len(hashes)):
        changed = bytearray(TOKENS)
        changed[4 * block_size * block] ^= 1
        other = extend(seed, bytes(changed), block_size)
        differ = [one != two for one, two in zip(other, hashes, strict=True)]
        assert differ == [i >= block for i in range(len(hashes))]


def test_salt_adapter_and_block_size_each_make_another_root() -> None:
    fields = [
        (None, None, 16), ("", None, 16), (None, "", 16), ("a", None, 16), (None, "a", 16),
        ("ab", "c", 16), ("a", "bc", 16), ("abc", None, 16), (None, None, 32), ("\ud800", None, 16),
    ]  # fmt: skip
    assert len({root(*field) for field in fields}) == len(fields)
    with pytest.raises(ValueError, match="at least 1"):
        root(None, None, 0)


def test_hashes_are_the_same_in_every_process_and_build() -> None:
    assert extend(root("salt", "lora", 4), TOKENS[:16], 4) == [15150132224142579675]
