"""Multimodal inputs: which may go to a prefill worker, and that they arrive as they were."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pullfill.engine import features
from pullfill.errors import BadMessage
from tests.support.features import feature
from tests.support.late import Late

torch: Any = Late("torch")


def test_what_a_prefill_worker_decodes_is_what_was_encoded() -> None:
    made = [feature(0, 4), feature(6, 3, modality="video", nbytes=4000)]
    found = features.decode(features.encode(made), tokens=9)
    assert found == made
    assert torch.equal(found[1].data["pixels"].data, made[1].data["pixels"].data)


@pytest.mark.parametrize(
    ("made", "may"),
    [
        ([(0, 4, 9), (5, 5, 9)], True),
        ([(0, 4, 9), (6, 5, 9)], False),  # a part of it is beyond what is computed there
        ([(0, 4, features.MAX_BYTES)], True),
        ([(0, 4, features.MAX_BYTES), (5, 1, 9)], False),
        ([(0, 4, 0)], False),  # vLLM's caches leave the data out
    ],
)
def test_whole_features_up_to_a_limit_may_go(made: list[tuple[int, int, int]], may: bool) -> None:
    found = [feature(offset, length, nbytes=nbytes) for offset, length, nbytes in made]
    assert features.may_go(found, tokens=10) is may


def test_data_may_be_nested() -> None:
    nested = feature(0, 1)
    nested.data["pixels"].data = [torch.zeros(3), [torch.zeros(2, 2)], 7]
    assert features.nbytes([nested]) == 4 * 7


@cache
def good() -> bytes:
    return features.encode([feature(0, 4), feature(4, 4)])


@given(st.data())
def test_what_is_not_features_is_a_bad_message_by_hypothesis(draw: st.DataObject) -> None:
    at, byte = draw.draw(st.integers(0, len(good()) - 1)), draw.draw(st.integers(0, 255))
    changed = good()[:at] + bytes([byte]) + good()[at + 1 :]
    data = draw.draw(st.sampled_from([changed, good()[:at]]) | st.binary(max_size=200))
    try:
        found = features.decode(data, tokens=8)
    except BadMessage:
        return
    assert all(f.mm_position.offset + f.mm_position.length <= 8 for f in found)


def test_positions_beyond_the_prompt_and_empty_features_are_refused() -> None:
    for made in ([feature(5, 4)], [feature(-1, 2)], [feature(0, 2, nbytes=0)]):
        with pytest.raises(BadMessage, match="not where the prompt is"):
            features.decode(features.encode(made), tokens=8)


def test_the_digest_of_none_is_empty() -> None:
    assert features.digest(b"") == ""
    assert features.digest(good()) != features.digest(msgspec.msgpack.encode([]))
