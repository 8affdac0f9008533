"""Any request over HTTP: it is answered, or refused with a reason, and ends no process.

What this found and what was repaired for it: tests/integration/test_odd_requests.py.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.cluster import Cluster
from tests.support.fuzz import MANY
from tests.support.odd import send, unharmed, wrong_with
from tests.support.oracle import Oracle

pytestmark = pytest.mark.engine

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
PARAMETERS = st.lists(st.sampled_from(sorted(SAMPLING)), max_size=5, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: SAMPLING[name] for name in names})
)
LONG = st.integers(600, 1700).map(lambda n: [20 + i * 7 % 200 for i in range(n)])
PROMPT = st.one_of(
    st.just("hello"), TEXT, LONG, IDS, st.lists(TEXT, max_size=3), st.lists(IDS, max_size=3), ANY
)
MESSAGES = st.lists(
    st.one_of(
        st.builds(
            lambda role, content: {"role": role, "content": content},
            st.sampled_from(["user", "system", "assistant", "tool", "x"]),
            st.one_of(TEXT, st.just([{"type": "text", "text": "hi"}]), ANY),
        ),
        st.just({"role": "user", "content": "hello"}),
    ),
    max_size=3,
)
TOOLS = st.fixed_dictionaries({}, optional={
    "tools": st.lists(st.builds(
        lambda name, schema: {"type": "function", "function": {"name": name, "parameters": schema}},
        TEXT, SCHEMA), max_size=2),
    "tool_choice": st.sampled_from(["auto", "required", "none",
                                    {"type": "function", "function": {"name": "a"}}]),
})  # fmt: skip
LIMIT = st.one_of(st.integers(1, 4), st.integers(1, 4), INT.filter(lambda n: n != 0))


def _bodies(**parts: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda fixed, *more: {**fixed, **{k: v for m in more for k, v in m.items()}},
        st.fixed_dictionaries(parts), PARAMETERS,
    )  # fmt: skip


COMPLETION = st.tuples(st.just("/v1/completions"), _bodies(prompt=PROMPT, max_tokens=LIMIT))
CHAT = st.tuples(
    st.just("/v1/chat/completions"),
    st.builds(lambda a, b: a | b, _bodies(messages=MESSAGES, max_tokens=LIMIT), TOOLS),
)
OTHERS = st.one_of(
    st.tuples(
        st.just("/v1/responses"),
        _bodies(input=st.one_of(TEXT, MESSAGES), max_output_tokens=LIMIT),
    ),
    st.tuples(st.just("/v1/messages"), _bodies(messages=MESSAGES, max_tokens=LIMIT)),
    st.tuples(st.just("/tokenize"), _bodies(prompt=PROMPT)),
    st.tuples(st.just("/detokenize"), _bodies(tokens=IDS)),
    st.tuples(
        st.just("/v1/chat/completions/batch"),
        _bodies(messages=st.lists(MESSAGES, max_size=2), max_tokens=LIMIT),
    ),
)  # fmt: skip
REQUEST = st.one_of(COMPLETION, COMPLETION, CHAT, OTHERS)


@pytest.mark.parametrize("policy", ["always_local", "always_remote"])
def test_fuzz_no_request_ends_an_engine_and_each_gets_an_answer(
    cluster: Cluster, oracle: Oracle, policy: str
) -> None:
    cluster.set_router(policy=policy)
    chosen = settings(
        max_examples=MANY // 2 or 40,
        derandomize=not MANY,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )

    statuses: Counter[int] = Counter()
    workers = [worker for worker in cluster.workers if worker.alive]

    def prop(request: tuple[str, dict[str, Any]]) -> None:
        answer = send(cluster, *request)
        statuses[answer.status_code] += 1
        wrong = wrong_with(answer)
        assert not wrong, f"{wrong}: {answer.text[:500]}"
        assert all(worker.alive for worker in workers), "a process died"

    with unharmed(cluster, oracle):
        chosen(given(request=REQUEST)(prop))()
    assert min(statuses[200], statuses[400]) > 5, (
        f"the requests are not odd in both ways: {statuses}"
    )
