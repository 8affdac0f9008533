"""The store of request traces: its keys and its bound."""

from __future__ import annotations

import pytest

from pullfill.frontend.explain import ExplainStore, Trace, key_of
from pullfill.wire import ExplainRecord


def record(request_id: str) -> ExplainRecord:
    return ExplainRecord(
        request_id=request_id,
        path="remote",
        reason="long_prompt",
        prompt_tokens=9,
        prefix_hit_tokens=0,
        remote_tokens=8,
        decode_instance="d",
    )


@pytest.mark.parametrize(
    ("request_id", "external_id", "key"),
    [
        ("chatcmpl-x-12345678", "chatcmpl-x", "chatcmpl-x"),
        ("2_chatcmpl-x-12345678", "chatcmpl-x", "2_chatcmpl-x"),
        ("cmpl-x-0-12345678", "cmpl-x-0", "cmpl-x-0"),
        ("0_cmpl-x-1-12345678", "cmpl-x-1", "0_cmpl-x-1"),
        ("7_mine-12345678", "7_mine", "7_mine"),
        ("bare", None, "bare"),
    ],
)
def test_explain_keys_drop_vllms_random_tail_and_keep_the_choice(
    request_id: str, external_id: str | None, key: str
) -> None:
    assert key_of(request_id, external_id) == key


@pytest.mark.parametrize("key", ["cmpl-x", "cmpl-x-0", "0_cmpl-x", "0_cmpl-x-0", "cmpl-x_0"])
def test_a_response_id_finds_its_first_part(key: str) -> None:
    store = ExplainStore()
    store.open("w", Trace(key, 0.5, 7.0))
    store.put(record("w"))
    found = store.get("cmpl-x")
    assert found is not None
    assert found.request_id == "cmpl-x"
    assert (found.timings_ms.route, found.timings_ms.first_token) == (0.5, 7.0)
    assert store.get("other") is None


def test_explain_store_is_bounded_and_ignores_requests_it_never_sent() -> None:
    store = ExplainStore(limit=3)
    store.put(record("stranger"))
    assert store.get("stranger") is None
    for i in range(5):
        store.open(f"w{i}", Trace(f"k{i}"))
        store.put(record(f"w{i}"))
    assert [store.get(f"k{i}") is not None for i in range(5)] == [False, False, True, True, True]


def test_records_since_a_number_come_newest_first_and_each_once() -> None:
    store = ExplainStore(limit=3)
    for i in range(5):
        store.open(f"w{i}", Trace(f"k{i}"))
        store.put(record(f"w{i}"))
    found = [(trace.key, trace.serial) for _, trace in store.since(0)]
    assert found == [("k4", 5), ("k3", 4), ("k2", 3)]
    assert [trace.key for _, trace in store.since(4)] == ["k4"]
    assert list(store.since(5)) == []
