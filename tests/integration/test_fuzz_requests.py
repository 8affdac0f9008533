"""Any request over HTTP: it is answered, or refused with a reason, and ends no process.

What this found and what was repaired for it: tests/integration/test_odd_requests.py.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import event
from hypothesis import strategies as st

from tests.support.cluster import Cluster
from tests.support.fuzz import MANY, explore
from tests.support.odd import send, unharmed, wrong_with
from tests.support.oracle import Oracle

VOCAB = 384
SMALL = st.integers(-2, 8)
HUGE = st.sampled_from([2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30])
INT = st.one_of(SMALL, SMALL, HUGE)
FLOAT = st.one_of(
    st.floats(-3, 3),
    st.sampled_from([0.0, 1.0, 1e-300, 1e-45, 1e-5, 1e300, -1e300]),
    st.floats(allow_nan=True, allow_infinity=True),
)
TEXT = st.one_of(
    st.sampled_from(
        ["", "a", " ", "hello", "\x00", "\ud800", "\U0001f600", "</s>", "{%", "x" * 3000]
    ),
    st.text(max_size=12),
)
TOKEN = st.one_of(
    st.integers(0, VOCAB - 1), st.integers(0, VOCAB - 1), st.integers(-1, VOCAB), HUGE
)
ANY = st.one_of(st.none(), st.booleans(), INT, FLOAT, TEXT, st.lists(TEXT, max_size=2),
                st.dictionaries(TEXT, INT, max_size=2))  # fmt: skip


def _deep(schema: dict[str, Any], levels: int) -> dict[str, Any]:
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


LEAVES = st.one_of(
    st.sampled_from([
        {}, True, {"$ref": "#"}, {"$ref": "#/x"}, {"type": "string"}, {"type": "nothing"},
        {"type": "integer", "minimum": 5, "maximum": 3}, {"enum": []}, {"enum": [1, None, "x"]},
        {"const": "\x00"}, {"type": "string", "pattern": "(a+)+b"},
        {"type": "string", "pattern": "("},
        {"type": "string", "format": "date-time"}, {"type": "array", "minItems": 10**6},
        {"type": "string", "minLength": 10**6}, {"not": {}}, {"type": ["string", "null"]},
        {"type": "number", "multipleOf": 0}, {"patternProperties": {"(": {}}},
        {"type": "array", "prefixItems": [{}], "items": False}, {"$ref": 5}, {"allOf": [{}, {}]},
    ]),
    st.builds(lambda n: {"enum": [f"v{i}" for i in range(n)]}, st.integers(1, 300)),
)  # fmt: skip
SCHEMA = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda s: {"type": "array", "items": s}, inner),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
        st.builds(lambda k, s: {"type": "object", "properties": {k: s}}, TEXT, inner),
        st.builds(_deep, inner.filter(lambda s: isinstance(s, dict)), st.integers(1, 90)),
    ),
    max_leaves=4,
)
REGEX = st.one_of(
    st.sampled_from([
        "", "(", "(a+)+b", "(a|aa)+$", "(.*a){12}", "a{100000}", "[z-a]", "(?=a)b", "\\1(a)",
        "\x00",
        "((a{1,30}){1,30}){1,30}", "[^\\x00-\\U0010ffff]", "(((.{0,9}){0,9}){0,9}){0,9}", "\\p{L}+",
        "^$", "a{5,2}", ".{0,2000}x.{0,2000}",
    ]),
    st.text("ab(){}[]|*+?.^$\\,0129-", max_size=14),
)  # fmt: skip
GRAMMAR = st.one_of(
    st.sampled_from([
        "root ::= root", 'root ::= root "a"', 'root ::= ""', "start: start", "start: /(/",
        "root ::=",
        'root ::= "a" root | "b"', "root ::= [a-z]{0,3000}", "\x00", 'x ::= "a"',
        'start: "a"+ | x\nx: /b/',
        "root ::= " + "(" * 300 + '"a"' + ")" * 300,
    ]),
    st.text('root:=|"ab\n()[]*+ ', max_size=20),
)  # fmt: skip
STRUCTURED = st.one_of(
    st.builds(lambda s: {"json": s}, SCHEMA),
    st.builds(lambda s: {"json": json.dumps(s)}, SCHEMA),
    st.builds(lambda r: {"regex": r}, REGEX),
    st.builds(lambda g: {"grammar": g}, GRAMMAR),
    st.builds(lambda c: {"choice": c}, st.lists(TEXT, max_size=4)),
    st.just({"json_object": True}),
    st.builds(lambda s: {"structural_tag": s}, TEXT),
    st.dictionaries(st.sampled_from(["json", "regex", "choice", "grammar", "json_object"]), ANY),
)
FORMAT = st.one_of(
    st.builds(
        lambda s: {"type": "json_schema", "json_schema": {"name": "x", "schema": s}}, SCHEMA
    ),
    st.builds(
        lambda s, b: {"type": "structural_tag", "triggers": [b],
                      "structures": [{"begin": b, "schema": s, "end": ">"}]}, SCHEMA, TEXT
    ),
    st.sampled_from([{"type": "json_object"}, {"type": "text"}, {"type": "x"}, {}, None]),
)  # fmt: skip
IDS = st.lists(TOKEN, max_size=4)
SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "temperature": FLOAT, "top_p": FLOAT, "top_k": INT, "min_p": FLOAT, "presence_penalty": FLOAT,
    "frequency_penalty": FLOAT, "repetition_penalty": FLOAT, "seed": INT, "n": INT,
    "min_tokens": INT, "stop": st.one_of(TEXT, st.lists(TEXT, max_size=5)), "stop_token_ids": IDS,
    "bad_words": st.lists(TEXT, max_size=3), "logprobs": st.one_of(SMALL, st.booleans(), HUGE),
    "logit_bias": st.dictionaries(TOKEN.map(str), FLOAT, max_size=3), "prompt_logprobs": INT,
    "allowed_token_ids": IDS, "truncate_prompt_tokens": INT, "structured_outputs": STRUCTURED,
    "response_format": FORMAT, "vllm_xargs": st.dictionaries(
        st.sampled_from(["kv_transfer_params", "ec_transfer_params", "ttft_ms", "itl_ms", "x"]),
        st.one_of(TEXT, INT, FLOAT, st.lists(INT, max_size=2)), max_size=2),
    "kv_transfer_params": ANY, "priority": INT, "ignore_eos": st.booleans(), "echo": st.booleans(),
    "stream": st.booleans(), "stream_options": st.fixed_dictionaries({"include_usage": ANY}),
    "cache_salt": TEXT, "skip_special_tokens": st.booleans(), "detokenize": ANY,
    "include_stop_str_in_output": st.booleans(), "top_logprobs": INT, "user": TEXT,
    "add_special_tokens": st.booleans(), "return_token_ids": st.booleans(), "best_of": INT,
    "return_tokens_as_token_ids": st.booleans(), "thinking_token_budget": INT,
    "use_beam_search": st.booleans(), "length_penalty": FLOAT, "suffix": TEXT,
    "repetition_detection": st.dictionaries(
        st.sampled_from(["max_pattern_size", "min_pattern_size", "min_count"]), INT),
    "logprob_token_ids": IDS, "trace_decode_token_ids": IDS, "stream_interval": INT,
    "prompt_embeds": TEXT, "data_parallel_rank": INT, "request_id": TEXT, "session_id": TEXT,
    "skip_reading_prefix_cache": st.booleans(), "routed_experts_prompt_start": INT,
}  # fmt: skip

NAME = st.sampled_from(["a", "x", "get_weather", "city"])
WORD = st.text("abcdefghij ", min_size=1, max_size=8)
GOOD_TOKEN = st.integers(0, VOCAB - 1)
GOOD_SCHEMA = st.recursive(
    st.sampled_from([
        {"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"type": "null"},
        {"enum": ["a", "b", 1]}, {"const": "x"}, {"type": "string", "maxLength": 5},
        {"type": "string", "pattern": "[a-c]{1,3}"}, {"type": "number"},
    ]),
    lambda inner: st.one_of(
        st.builds(lambda s: {"type": "array", "items": s, "maxItems": 3}, inner),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
        st.builds(
            lambda k, s: {"type": "object", "properties": {k: s}, "required": [k]}, NAME, inner
        ),
    ),
    max_leaves=3,
)  # fmt: skip
GOOD_STRUCTURED = st.one_of(
    st.builds(lambda s: {"json": s}, GOOD_SCHEMA),
    st.builds(lambda c: {"choice": c}, st.lists(WORD, min_size=1, max_size=4, unique=True)),
    st.sampled_from([
        {"regex": "[a-z]{1,8}"}, {"regex": "(yes|no)"}, {"regex": r"\d{3}-\d{4}"},
        {"grammar": 'root ::= "a" | "b" root'}, {"json_object": True},
    ]),
)  # fmt: skip
GOOD_FORMAT = st.one_of(
    st.builds(
        lambda s: {"type": "json_schema", "json_schema": {"name": "x", "schema": s}}, GOOD_SCHEMA
    ),
    st.sampled_from([{"type": "json_object"}, {"type": "text"}]),
)
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.one_of(st.floats(0.01, 2), st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 100.0])),
    "top_p": st.one_of(st.floats(0.01, 1), st.sampled_from([1e-6, 1.0])),
    "top_k": st.sampled_from([-1, 0, 1, 2, 50, VOCAB, VOCAB + 1, 10**6]),
    "min_p": st.floats(0, 1), "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2), "repetition_penalty": st.floats(0.01, 2),
    "seed": st.one_of(st.integers(0, 2**32), st.sampled_from([-1, 2**63 - 1, -(2**63)])),
    "min_tokens": st.sampled_from([0, 1]),
    "stop": st.one_of(WORD, st.lists(WORD, max_size=4)),
    "stop_token_ids": st.lists(GOOD_TOKEN, max_size=4),
    "bad_words": st.lists(WORD.filter(str.strip), max_size=3),
    "logit_bias": st.dictionaries(GOOD_TOKEN.map(str), st.floats(-100, 100), max_size=5),
    "allowed_token_ids": st.lists(GOOD_TOKEN, min_size=1, max_size=5, unique=True),
    "truncate_prompt_tokens": st.sampled_from([1, 2, 100]),
    "structured_outputs": GOOD_STRUCTURED, "response_format": GOOD_FORMAT,
    "vllm_xargs": st.dictionaries(NAME, st.one_of(WORD, st.integers(0, 9)), max_size=2),
    "priority": st.just(0), "ignore_eos": st.booleans(), "stream": st.booleans(),
    "cache_salt": WORD, "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(), "user": WORD,
    "add_special_tokens": st.booleans(), "return_token_ids": st.booleans(),
    "spaces_between_special_tokens": st.booleans(), "length_penalty": st.floats(0.1, 2),
    "repetition_detection": st.builds(
        lambda low, more, count: {
            "min_pattern_size": low, "max_pattern_size": low + more, "min_count": count},
        st.integers(1, 3), st.integers(0, 3), st.integers(2, 4)),
    "skip_reading_prefix_cache": st.booleans(),
}  # fmt: skip
"""Values that vLLM takes. Some two of them exclude each other."""
CHAT_ONLY: dict[str, st.SearchStrategy[Any]] = {
    "logprobs": st.just(True), "top_logprobs": st.integers(0, 5),
}  # fmt: skip
COMPLETION_ONLY: dict[str, st.SearchStrategy[Any]] = {
    "logprobs": st.integers(0, 5), "prompt_logprobs": st.integers(0, 3), "echo": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(), "n": st.integers(1, 4),
}  # fmt: skip


def _some(
    table: dict[str, st.SearchStrategy[Any]], at_least: int, at_most: int
) -> st.SearchStrategy[dict[str, Any]]:
    """Values for some of the parameters of a table."""
    return st.lists(
        st.sampled_from(sorted(table)), min_size=at_least, max_size=at_most, unique=True
    ).flatmap(lambda names: st.fixed_dictionaries({name: table[name] for name in names}))


def _parameters(more: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Five times in seven only values that vLLM takes, once with an odd one among them, once only
    odd ones."""
    good = _some(GOOD | more, 0, 6)
    mixed = st.builds(lambda a, b: a | b, good, _some(SAMPLING, 1, 1))
    return st.sampled_from([good] * 5 + [mixed, _some(SAMPLING, 1, 5)]).flatmap(lambda kind: kind)


def _mostly(good: st.SearchStrategy[Any], odd: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.sampled_from([good] * 7 + [odd]).flatmap(lambda kind: kind)


LONG = st.integers(600, 1700).map(lambda n: [20 + i * 7 % 200 for i in range(n)])
GOOD_PROMPT = st.one_of(
    st.just("hello"), WORD, LONG, st.lists(GOOD_TOKEN, min_size=1, max_size=40),
    st.lists(WORD, min_size=1, max_size=3),
)  # fmt: skip
PROMPT = _mostly(GOOD_PROMPT, st.one_of(TEXT, IDS, st.lists(TEXT, max_size=3),
                                        st.lists(IDS, max_size=3), ANY))  # fmt: skip
GOOD_MESSAGES = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "system", "assistant"]),
        st.one_of(WORD, st.just([{"type": "text", "text": "hi"}])),
    ),
    min_size=1,
    max_size=3,
)
MESSAGES = _mostly(GOOD_MESSAGES, st.lists(
    st.one_of(
        st.builds(
            lambda role, content: {"role": role, "content": content},
            st.sampled_from(["user", "system", "assistant", "tool", "x"]),
            st.one_of(TEXT, st.just([{"type": "text", "text": "hi"}]), ANY),
        ),
        st.just({"role": "user", "content": "hello"}),
    ),
    max_size=3,
))  # fmt: skip
ODD_TOOLS = st.fixed_dictionaries({}, optional={
    "tools": st.lists(st.builds(
        lambda name, schema: {"type": "function", "function": {"name": name, "parameters": schema}},
        TEXT, SCHEMA), max_size=2),
    "tool_choice": st.sampled_from(["auto", "required", "none",
                                    {"type": "function", "function": {"name": "a"}}]),
})  # fmt: skip
GOOD_TOOLS = st.builds(
    lambda schema, choice: {
        "tools": [{"type": "function", "function": {"name": "a", "parameters": schema}}],
        "tool_choice": choice,
    },
    st.builds(lambda k, s: {"type": "object", "properties": {k: s}}, NAME, GOOD_SCHEMA),
    st.sampled_from(["auto", "required", "none", {"type": "function", "function": {"name": "a"}}]),
)
TOOLS = st.sampled_from([st.just({})] * 4 + [GOOD_TOOLS, ODD_TOOLS]).flatmap(lambda kind: kind)
LIMIT = _mostly(st.integers(1, 6), INT.filter(lambda n: n != 0))


def _bodies(
    more: dict[str, st.SearchStrategy[Any]], **parts: st.SearchStrategy[Any]
) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda a, b: a | b, st.fixed_dictionaries(parts), _parameters(more))


COMPLETION = st.tuples(
    st.just("/v1/completions"), _bodies(COMPLETION_ONLY, prompt=PROMPT, max_tokens=LIMIT)
)
CHAT = st.tuples(
    st.just("/v1/chat/completions"),
    st.builds(lambda a, b: a | b, _bodies(CHAT_ONLY, messages=MESSAGES, max_tokens=LIMIT), TOOLS),
)
OTHERS = st.one_of(
    st.tuples(
        st.just("/v1/responses"),
        _bodies({}, input=_mostly(WORD, st.one_of(TEXT, MESSAGES)), max_output_tokens=LIMIT),
    ),
    st.tuples(st.just("/v1/messages"), _bodies({}, messages=MESSAGES, max_tokens=LIMIT)),
    st.tuples(st.just("/tokenize"), _bodies({}, prompt=PROMPT)),
    st.tuples(st.just("/detokenize"), _bodies({}, tokens=IDS)),
    st.tuples(
        st.just("/v1/chat/completions/batch"),
        _bodies({}, messages=st.lists(MESSAGES, max_size=2), max_tokens=LIMIT),
    ),
)
REQUEST = st.sampled_from([COMPLETION] * 4 + [CHAT] * 3 + [OTHERS]).flatmap(lambda kind: kind)


pytestmark = pytest.mark.engine


@pytest.mark.parametrize("policy", ["always_local", "always_remote"])
@pytest.mark.essential
def test_fuzz_no_request_ends_an_engine_and_each_gets_an_answer(
    cluster: Cluster, oracle: Oracle, policy: str
) -> None:
    cluster.set_router(policy=policy)
    reached = Counter[bool]()
    workers = [worker for worker in cluster.workers if worker.alive]

    def prop(request: tuple[str, dict[str, Any]]) -> None:
        answer = send(cluster, *request)
        served = answer.status_code == 200 and '"error"' not in answer.text
        event(f"{request[0]}: {'served' if served else 'refused'}")
        reached[served] += 1
        wrong = wrong_with(answer)
        assert not wrong, f"{wrong}: {answer.text[:500]}"
        assert all(worker.alive for worker in workers), "a process died"

    with unharmed(cluster, oracle):
        explore(MANY // 2 or 40, prop, request=REQUEST)
    share = reached[True] / reached.total()
    print(f"{policy}: {reached.total()} requests, {share:.0%} served, the others refused")
    assert 0.4 < share < 0.98, "most requests reach an engine, and some are refused"
