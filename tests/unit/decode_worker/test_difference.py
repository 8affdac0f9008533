"""How far two prefills are apart: numbers of each type, rounding against wrong values."""

from __future__ import annotations

import numpy as np
import pytest

from pullfill.decode_worker.difference import (
    WORST,
    Pages,
    kv_difference,
    kv_tolerance,
    logprob_difference,
    of_groups,
)
from pullfill.engine.groups import Groups

BLOCKS, LAYERS, NUMBERS = 3, 2, 64
_DRAW = np.random.default_rng(7)
KV = _DRAW.standard_normal((BLOCKS, LAYERS * NUMBERS)).astype(np.float32)


def pages(numbers: np.ndarray, dtype: str) -> Pages:
    """As they lie in a KV cache of that type."""
    if dtype == "bfloat16":
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return numbers.astype(dtype).view(np.uint8)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rounding_passes_and_one_wrong_block_of_one_layer_does_not(dtype: str) -> None:
    rounded = KV * (1 + _DRAW.uniform(-1, 1, KV.shape).astype(np.float32) * 2.0**-9)
    if dtype == "float32":
        rounded = KV * np.float32(1 + 1e-6)
    near = kv_difference(pages(KV, dtype), pages(rounded, dtype), dtype, LAYERS)
    assert 0 < near < kv_tolerance(dtype)
    wrong = KV.copy()
    wrong[1, NUMBERS:] = np.roll(wrong[1, NUMBERS:], 1)
    far = kv_difference(pages(KV, dtype), pages(wrong, dtype), dtype, LAYERS)
    assert far > 0.5


def test_bytes_of_eight_bit_types_are_numbers_too() -> None:
    # e4m3: 0x38 is 1, 0x40 is 2, 0xC0 is -2, 0x08 is 2**-6. e5m2: 0x3C is 1, 0x40 is 2.
    ours = np.array([[0x38, 0x40]], np.uint8)
    theirs = np.array([[0x38, 0xC0]], np.uint8)
    assert kv_difference(ours, theirs, "fp8", 1) == pytest.approx(4 / 5**0.5)
    theirs = np.array([[0x40, 0x40]], np.uint8)
    assert kv_difference(np.array([[0x3C, 0x40]], np.uint8), theirs, "fp8_e5m2", 1) == (
        pytest.approx(1 / 5**0.5)
    )


def test_what_is_no_number_is_as_far_as_can_be() -> None:
    broken = KV.copy()
    broken[0, 0] = np.nan
    assert kv_difference(pages(KV, "float32"), pages(broken, "float32"), "float32", 1) == WORST
    assert kv_difference(pages(KV, "float32"), pages(KV, "float32"), "nvfp4", 1) is None


def test_log_probabilities_of_shared_tokens_are_compared() -> None:
    assert logprob_difference({1: -1.0, 2: -2.0}, {2: -2.5, 3: -3.0}) == pytest.approx(0.5)
    assert logprob_difference({1: -1.0}, {2: -1.0}) == WORST


def test_a_state_is_compared_part_by_part_and_its_padding_is_not() -> None:
    """Two groups, one of KV and one of states. A block has memory for two layers."""
    groups = Groups("", (2, 1), ((), (("bfloat16", 2 * NUMBERS), ("float32", 4 * NUMBERS))))
    kv = pages(np.tile(KV, 2), "bfloat16")
    conv, state = pages(KV[:, :NUMBERS], "bfloat16"), pages(KV[:, NUMBERS:], "float32")
    page = kv.shape[1] // LAYERS

    def compared(state: Pages, padding: int) -> float | None:
        states = np.full((BLOCKS, LAYERS, 7 * NUMBERS), padding, np.uint8)
        states[:, 0, : 6 * NUMBERS] = np.concatenate([conv, state], axis=1)
        states[:, 1] = 0  # no layer
        wide = np.zeros((BLOCKS, LAYERS, 7 * NUMBERS), np.uint8)
        wide[:, :, :page] = kv.reshape(BLOCKS, LAYERS, page)
        ours = np.concatenate([wide, base]).reshape(2 * BLOCKS, -1)
        return of_groups(
            ours, np.concatenate([wide, states]).reshape(2 * BLOCKS, -1), "bfloat16", LAYERS, groups
        )

    base = np.zeros((BLOCKS, LAYERS, 7 * NUMBERS), np.uint8)
    base[:, 0, : 6 * NUMBERS] = np.concatenate([conv, state], axis=1)
    assert compared(state, 255) == 0
    near = compared(pages(KV[:, NUMBERS:] * np.float32(1 + 1e-6), "float32"), 255)
    assert 0 < near < 1e-5, "as bfloat16 the low half of a float32 would be any number"
    far = compared(pages(np.roll(KV[:, NUMBERS:], 1), "float32"), 0)
    assert far > 0.5
