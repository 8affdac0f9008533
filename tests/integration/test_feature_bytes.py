"""Multimodal inputs arrive at a prefill worker as they were, and what is none is refused."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pullfill.engine import features
from pullfill.errors import BadMessage
from tests.support.features import feature


@pytest.mark.essential
def test_what_a_prefill_worker_decodes_is_what_was_encoded() -> None:
    made = [feature(0, 4), feature(6, 3, modality="video", nbytes=4000)]
    found = features.decode(features.encode(made), tokens=9)
    assert found == made
    assert torch.equal(found[1].data["pixels"].data, made[1].data["pixels"].data)
    assert features.may_go(made, tokens=9)
    assert features.nbytes(made) == 4300


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
