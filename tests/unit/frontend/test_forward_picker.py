"""Bodies of both stages, and what the policies need of a prompt."""

from __future__ import annotations

import json

from pullfill.frontend.forward.picker import BLOCK, prompt_of
from pullfill.frontend.forward.stock import decode_body, prefill_body


def test_the_prefill_stage_has_one_token() -> None:
    body = {
        "messages": [], "max_tokens": 9, "max_completion_tokens": 9, "stream": True,
        "stream_options": {"include_usage": True}, "min_tokens": 3, "logprobs": True,
        "top_logprobs": 2, "tools": [1], "seed": 5, "stop": "x", "stop_token_ids": [1],
    }  # fmt: skip
    assert json.loads(prefill_body(body, {"a": 1})) == {
        "messages": [], "max_tokens": 1, "max_completion_tokens": 1, "stream": False,
        "tools": [1], "seed": 5, "ignore_eos": True, "kv_transfer_params": {"a": 1},
    }  # fmt: skip


def test_the_decode_stage_is_as_it_came() -> None:
    body = {"prompt": "é", "max_tokens": 9, "kv_transfer_params": {"mine": 1}}
    assert json.loads(decode_body(body, None)) == {"prompt": "é", "max_tokens": 9}
    told = json.loads(decode_body(body, {"b": 2}))
    assert told == {"prompt": "é", "max_tokens": 9, "kv_transfer_params": {"b": 2}}


def test_a_longer_conversation_begins_with_the_blocks_of_a_shorter_one() -> None:
    first = {"role": "user", "content": "x" * 4 * BLOCK * 3}
    more = [first, {"role": "assistant", "content": "y" * 4 * BLOCK}]
    short, long = (prompt_of({"model": "m", "messages": m}) for m in ([first], more))
    assert 3 <= len(short.hashes) < len(long.hashes)
    assert list(long.hashes[: len(short.hashes)]) == list(short.hashes)
    other = prompt_of({"model": "n", "messages": more})
    assert list(other.hashes[:1]) != list(long.hashes[:1])


def test_token_ids_are_counted_not_estimated() -> None:
    assert prompt_of({"prompt": list(range(2 * BLOCK))}).tokens == 2 * BLOCK
    assert len(prompt_of({"prompt": list(range(2 * BLOCK))}).hashes) == 2


def test_an_odd_prompt_has_no_blocks_but_a_length() -> None:
    for body in (None, {}, {"prompt": 3}, {"prompt": [-1]}, {"prompt": []}, {"messages": {}}):
        found = prompt_of(body)
        assert (found.tokens >= 1, len(found.hashes)) == (True, 0)
