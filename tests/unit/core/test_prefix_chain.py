"""Names of blocks."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pullfill.prefix.chain import (
    I64,
    as_array,
    chain,
    compiled,
    extend,
    root,
    sip_chain,
    state_of,
)

TOKENS = np.arange(100, dtype=np.uint32).tobytes()


@pytest.mark.parametrize("block_size", [1, 3, 16, 17])
def test_a_block_is_named_by_all_tokens_up_to_its_end(block_size: int) -> None:
    seed = root(None, None, block_size)
    hashes = chain(seed, TOKENS, block_size)
    assert len(hashes) == 100 // block_size
    for block in range(len(hashes)):
        changed = bytearray(TOKENS)
        changed[4 * block_size * block] ^= 1
        differ = chain(seed, changed, block_size) != hashes
        assert differ.tolist() == [i >= block for i in range(len(hashes))]


def test_the_hash_is_siphash_1_3() -> None:
    """Python's own hash of bytes is that, with the key 0 when hashes are not randomized."""
    code = "print(hash(b'abcdefghijkl') % 2**64)"
    environment = {"PYTHONHASHSEED": "0"}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    if sys.hash_info.algorithm != "siphash13":
        pytest.skip(f"this Python hashes with {sys.hash_info.algorithm}")
    out = np.zeros(1, np.uint64)
    sip_chain(0, 0, np.frombuffer(b"abcdefghijkl", np.uint32), 3, out)
    assert int(out[0]) == int(told.stdout)


@given(cut=st.integers(0, 25))
def test_a_chain_goes_on_from_the_hash_of_any_block(cut: int) -> None:
    seed = root("salt", None, 4)
    whole = chain(seed, TOKENS, 4)
    first = chain(seed, TOKENS[: 16 * cut], 4)
    parent = int(first[-1]) if cut else state_of(seed)
    assert [*first, *extend(parent, TOKENS[16 * cut :], 4)] == whole.tolist()


def test_salt_adapter_and_block_size_each_make_another_root() -> None:
    fields = [
        (None, None, 16), ("", None, 16), (None, "", 16), ("a", None, 16), (None, "a", 16),
        ("ab", "c", 16), ("a", "bc", 16), ("abc", None, 16), (None, None, 32), ("\ud800", None, 16),
    ]  # fmt: skip
    assert len({root(*field) for field in fields}) == len(fields)
    assert root("a", "b", 16) == root("a", "b", 16)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_of_tokens_gives_the_same(kind: type) -> None:
    seed = root(None, None, 16)
    assert (chain(seed, kind(TOKENS), 16) == chain(seed, TOKENS, 16)).all()
    shifted = memoryview(b"x" + TOKENS)[1:]
    assert (chain(seed, shifted, 16) == chain(seed, TOKENS, 16)).all()


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        root(None, None, 0)
    with pytest.raises(ValueError, match="8 bytes"):
        chain(b"short", TOKENS, 16)
    with pytest.raises(ValueError, match="buffer size"):
        as_array(b"x" * 9)


# ------------------------------------------------------------------ numba


def test_a_function_compiles_where_nothing_can_be_cached() -> None:
    """numba caches only what comes from a file. One in a folder that cannot be written is alike."""
    scope: dict[str, Any] = {}
    exec("def twice(number):\n    return 2 * number", scope)
    twice: Any = compiled(I64)(scope["twice"])
    assert twice(21) == 42
    assert len(twice.nopython_signatures) == 1
