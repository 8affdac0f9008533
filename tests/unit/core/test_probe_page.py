"""A page in the format that was asked for: exemplars in OpenMetrics, `_created` in neither."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from pullfill.runtime import probe

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
"""What Prometheus 2.42 sends."""


@pytest.fixture
def observed() -> Iterator[None]:
    made: list[Any] = [
        Histogram("pullfill_test_page_seconds", "text", ["stage"], buckets=(0.1, 1.0)),
        Counter("pullfill_test_page_things", "text", ["what"]),
        Counter("vllm:test_tokens", "text"),
    ]
    made[0].labels("queue").observe(0.5, {"trace_id": "aa" * 16})
    made[0].labels("queue").observe(0.6, {"trace_id": "bb" * 16})
    made[0].labels("queue").observe(5.0)
    made[1].labels("x").inc(exemplar={"trace_id": "cc" * 16})
    yield
    for one in made:
        REGISTRY.unregister(one)


@pytest.mark.parametrize("accept", ["", "*/*", "text/html", "text/plain;version=0.0.4"])
def test_plain_text_for_whoever_does_not_know_openmetrics(observed: None, accept: str) -> None:
    body, kind = probe.page(accept)
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    assert b"# {" not in body
    assert b"_created" not in body
    names = {family.name for family in plain(body.decode())}
    assert {"pullfill_test_page_seconds", "pullfill_test_page_things"} <= names


def test_openmetrics_with_the_last_trace_of_each_bucket(observed: None) -> None:
    body, kind = probe.page(PROMETHEUS)
    assert kind == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert b"_created" not in body
    assert body.decode().endswith(probe.END)
    assert b"\nvllm:test_tokens_total 0.0\n" in body
    families = {family.name: family for family in openmetrics(body.decode())}
    buckets = {
        s.labels["le"]: (s.value, s.exemplar)
        for s in families["pullfill_test_page_seconds"].samples
        if s.name.endswith("_bucket")
    }
    assert {le: value for le, (value, _) in buckets.items()} == {"0.1": 0, "1.0": 2, "+Inf": 3}
    exemplar = buckets["1.0"][1]
    assert exemplar is not None
    assert (exemplar.labels, exemplar.value) == ({"trace_id": "bb" * 16}, 0.6)
    assert buckets["+Inf"][1] is None, "a request that is not traced leaves none"
    (thing,) = families["pullfill_test_page_things"].samples
    assert thing.exemplar is not None
    assert thing.exemplar.labels == {"trace_id": "cc" * 16}
