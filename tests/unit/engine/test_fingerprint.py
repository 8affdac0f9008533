"""Requests that make an engine compute the same have one fingerprint, others have another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pullfill.engine.fingerprint import fingerprint
from tests.support.fake_vllm import Request, request


def named(request_id: str, external: str, **params: Any) -> Request:
    made = request(request_id, [5, 6, 7], **params)
    made.external_req_id = external
    return made


BASE = named("cmpl-a-0-12345678", "cmpl-a-0", seed=7, temperature=0.8)


def test_ids_times_and_salts_do_not_matter() -> None:
    again = named("cmpl-b-0-87654321", "cmpl-b-0", seed=7, temperature=0.8)
    again = msgspec.structs.replace(again, arrival_time=1.0, priority=3, cache_salt="x")
    assert fingerprint(again) == fingerprint(BASE)
    assert len(fingerprint(BASE)) == 16


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_token_ids": [5, 6, 8]},
        {"prompt_token_ids": [5, 6]},
        {"lora_request": SimpleNamespace(lora_name="l", lora_path="p")},
        {
            "mm_features": [
                SimpleNamespace(identifier="cafe", mm_position=SimpleNamespace(offset=1, length=2))
            ]
        },
        {"prompt_token_ids": [2**70]},
    ],
)
def test_what_the_engine_computes_from_matters(change: dict[str, Any]) -> None:
    assert fingerprint(msgspec.structs.replace(BASE, **change)) != fingerprint(BASE)


@pytest.mark.parametrize(
    "params",
    [{"seed": 8}, {"seed": None}, {"temperature": 0.7}, {"max_tokens": 5}, {"min_tokens": 1}],
)
def test_sampling_parameters_matter(params: dict[str, Any]) -> None:
    params = {"seed": 7, "temperature": 0.8, **params}
    assert fingerprint(named("cmpl-a-0-1", "cmpl-a-0", **params)) != fingerprint(BASE)


def test_the_order_of_keys_does_not_matter() -> None:
    one = named("a", "a", extra_args={"x": 1, "y": {"p": 1, "q": 2}})
    two = named("a", "a", extra_args={"y": {"q": 2, "p": 1}, "x": 1})
    assert fingerprint(one) == fingerprint(two)


def test_the_choices_of_one_answer_share_it() -> None:
    """vLLM gives choice N the seed plus N."""
    choices = [named(f"{n}_cmpl-a-0-1234", "cmpl-a-0", seed=7 + n) for n in range(3)]
    alone = named("cmpl-a-0-1234", "cmpl-a-0", seed=7)
    assert {fingerprint(c) for c in choices} == {fingerprint(alone)}
