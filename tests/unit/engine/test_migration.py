"""Which broken answers can be continued exactly, and by what request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pullfill.engine import migration as c
from pullfill.engine.migration import fingerprint
from tests.support.fake_vllm import Request, request

OUT = [7, 8, 9]


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"seed": 3}, "seed"),
        ({"presence_penalty": 0.5}, "presence penalty"),
        ({"frequency_penalty": -0.5}, "frequency penalty"),
        ({"repetition_detection": {"max_pattern_size": 3}}, "repetition detection"),
        ({"structured_outputs": {"json": "{}"}}, "structured output"),
        ({"thinking_token_budget": 0}, "thinking budget"),
        ({"watermarking": True}, "watermark"),
        ({"trace_decode_token_ids": [1]}, "replays"),
        ({"extra_args": {"mine": 1, "ttft_ms": 250.0}}, "logits processors"),
        ({"n": 2}, "several choices"),
        ({"bad_words_token_ids": [[1], [8, 9, 5]]}, "bad words"),
        ({"bad_words_token_ids": [[9, 5]]}, "bad words"),
        ({"max_tokens": 3}, "not why it ended"),
        ({}, ""),
        ({"temperature": 0.0, "seed": 3}, ""),
        ({"temperature": 1.0}, ""),
        ({"presence_penalty": 0.0, "extra_args": {}, "watermarking": False}, ""),
        ({"bad_words_token_ids": [[9], [8], [7, 8, 5]]}, ""),
        ({"min_tokens": 50, "prompt_logprobs": 2}, ""),
        ({"extra_args": {"ttft_ms": 250.0, "itl_ms": 12.5}}, ""),
    ],
)
def test_only_what_depends_on_lost_state_is_not_continued(
    params: dict[str, Any], word: str
) -> None:
    why = c.why_not(request(**{"max_tokens": 100, **params}), OUT)
    assert word in why
    assert bool(why) == bool(word)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"prompt_token_ids": None}, "tokens only"),
        ({"prompt_embeds": "x"}, "tokens only"),
        ({"request_id": "1_cmpl-x-0-abcd", "external_req_id": "cmpl-x-0"}, "n > 1"),
    ],
)
def test_some_kinds_of_request_are_not_continued(change: dict[str, Any], word: str) -> None:
    assert word in c.why_not(msgspec.structs.replace(request(max_tokens=9), **change), OUT)


def test_the_answer_so_far_becomes_prompt_and_the_rest_stays() -> None:
    first = request("a", [1, 2], max_tokens=10, min_tokens=5, seed=None, temperature=0.7)
    first.cache_salt, first.priority, first.trace_headers = "salt", 3, {"traceparent": "t"}
    before = msgspec.msgpack.encode(first)
    second = c.migration_request(first, OUT)
    assert msgspec.msgpack.encode(first) == before, "the first request stays as it is"
    assert second.prompt_token_ids == [1, 2, 7, 8, 9]
    assert (second.sampling_params.max_tokens, second.sampling_params.min_tokens) == (7, 2)
    assert second.sampling_params.temperature == 0.7
    same = ("arrival_time", "cache_salt", "priority", "trace_headers", "external_req_id")
    assert all(getattr(first, name) == getattr(second, name) for name in same)
    assert c.room_for(first) == c.room_for(second) == 12


def test_prompt_logprobs_are_not_computed_twice_and_the_prefix_cache_serves_again() -> None:
    first = request(max_tokens=9, prompt_logprobs=1, skip_reading_prefix_cache=True)
    params = c.migration_request(first, OUT).sampling_params
    assert (params.prompt_logprobs, params.skip_reading_prefix_cache) == (None, None)
    assert first.sampling_params.prompt_logprobs == 1
    other = request(max_tokens=9, min_tokens=2, skip_reading_prefix_cache=True)
    params = c.migration_request(other, OUT).sampling_params
    assert (params.min_tokens, params.skip_reading_prefix_cache) == (0, True), "not for logprobs"


def test_what_the_engine_does_to_every_request_rules_all_out() -> None:
    def args(**flags: Any) -> Any:
        plain = {"logits_processors": None, "enable_return_routed_experts": False}
        return SimpleNamespace(**plain | flags)

    assert c.why_never(args(), c.FIELDS) == ""
    assert "--logits-processors" in c.why_never(args(logits_processors=["mine"]), c.FIELDS)
    routed = args(enable_return_routed_experts=True)
    assert "--enable-return-routed-experts" in c.why_never(routed, c.FIELDS)
    assert "brand_new" in c.why_never(args(), {"brand_new", *c.FIELDS})


def named(request_id: str, external: str, **params: Any) -> Request:
    made = request(request_id, [5, 6, 7], **params)
    made.external_req_id = external
    return made


BASE = named("cmpl-a-0-12345678", "cmpl-a-0", seed=7, temperature=0.8)


def test_what_the_engine_is_not_asked_for_does_not_matter() -> None:
    again = named("cmpl-b-0-87654321", "cmpl-b-0", seed=7, temperature=0.8)
    again = msgspec.structs.replace(again, arrival_time=1.0, priority=3, cache_salt="x")
    assert fingerprint(again) == fingerprint(BASE)
    assert len(fingerprint(BASE)) == 16
    one = named("a", "a", extra_args={"x": 1, "y": {"p": 1, "q": 2}})
    two = named("a", "a", extra_args={"y": {"q": 2, "p": 1}, "x": 1})
    assert fingerprint(one) == fingerprint(two), "the order of keys"
    # vLLM gives choice N the seed plus N.
    choices = [named(f"{n}_cmpl-a-0-1234", "cmpl-a-0", seed=7 + n) for n in range(3)]
    alone = named("cmpl-a-0-1234", "cmpl-a-0", seed=7)
    assert {fingerprint(c) for c in choices} == {fingerprint(alone)}


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
