"""What the frontend refuses because vLLM would not; the rest is in test_odd_requests.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine import request_limits


def structured(**given: Any) -> SimpleNamespace:
    fields = dict.fromkeys(("json", "regex", "choice", "grammar", "structural_tag"))
    return SimpleNamespace(structured_outputs=SimpleNamespace(**{**fields, **given}))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SimpleNamespace(stop=["s"] * (request_limits.MAX_STOPS + 1)), "stop has"),
        (SimpleNamespace(extra_args={"ec_transfer_params": 3}), "ec_transfer_params"),
        (structured(choice=["a"] * (request_limits.MAX_CHOICES + 1)), "choices"),
        (structured(regex="a" * (request_limits.MAX_STRUCTURED + 1)), "characters"),
        (structured(json={"const": "a" * request_limits.MAX_STRUCTURED}), "characters"),
    ],
)
def test_too_much_is_refused_with_a_reason(params: Any, words: str) -> None:
    assert words in request_limits.why_refused(params)


@pytest.mark.parametrize(
    "params",
    [
        SimpleNamespace(),  # a pooling request
        SimpleNamespace(
            stop=["s"] * request_limits.MAX_STOPS, extra_args={"kv_transfer_params": {}}
        ),
        structured(choice=["a"] * request_limits.MAX_CHOICES),
        structured(json="a" * request_limits.MAX_STRUCTURED),
    ],
)
def test_what_fits_passes(params: Any) -> None:
    assert request_limits.why_refused(params) == ""
