"""The probe server of a worker, and the metric names others build on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
from prometheus_client import REGISTRY, Counter, Histogram
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from pullfill.errors import ConfigError
from pullfill.runtime import metrics
from pullfill.runtime.probe import END, ProbeServer, page

PROMISED = {
    "pullfill_decision_total": ("path", "reason"),
    "pullfill_queue_depth_jobs": (),
    "pullfill_queue_depth_tokens": (),
    "pullfill_queue_oldest_age_seconds": (),
    "pullfill_handoff_stage_seconds": ("stage",),
    "pullfill_claim_total": ("result",),
    "pullfill_kv_write_bytes_total": ("transport",),
    "pullfill_kv_write_seconds": ("transport",),
    "pullfill_quarantined_blocks": (),
    "pullfill_stale_refused_total": ("what",),
    "pullfill_fallback_total": ("cause",),
    "pullfill_dead_letter_total": (),
    "pullfill_self_check_total": ("result",),
}


@pytest.fixture
async def probe() -> AsyncIterator[tuple[dict[str, bool], ProbeServer]]:
    """A server, and what decides whether it is ready."""
    state = {"ready": True}
    server = ProbeServer(
        "127.0.0.1",
        lambda: (state["ready"], {"degraded": False}),
        lambda: {"state": "ready"},
        jobs=lambda: {"jobs": [1]},
    )
    await server.start()
    yield state, server
    await server.stop()


async def _get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as reply:
        return reply.status, await reply.text()


async def test_routes(probe: tuple[dict[str, bool], ProbeServer]) -> None:
    state, server = probe
    assert (await _get(f"{server.url}/live"))[0] == 200
    assert await _get(f"{server.url}/ready") == (200, '{"ready": true, "degraded": false}')
    state["ready"] = False
    assert (await _get(f"{server.url}/ready"))[0] == 503
    assert await _get(f"{server.url}/status") == (200, '{"state": "ready"}')
    assert await _get(f"{server.url}/status?jobs") == (200, '{"state": "ready", "jobs": [1]}')
    taken = int(server.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"127.0.0.1:{taken} .*--http-port"):
        await ProbeServer("127.0.0.1", lambda: (True, {}), dict).start(taken)


@pytest.mark.essential
def test_promised_metrics_and_labels() -> None:
    families = {}
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase):
            (family,) = metric.describe()
            total = "_total" if family.type == "counter" else ""
            families[family.name + total] = tuple(metric._labelnames)
    for name, labels in PROMISED.items():
        assert families.get(name) == labels, name


# --------------------------------------------------------------------------- the page of metrics

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


def test_plain_text_for_whoever_does_not_know_openmetrics(observed: None) -> None:
    body, kind = page("*/*")
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    assert b"# {" not in body
    assert b"_created" not in body
    names = {family.name for family in plain(body.decode())}
    assert {"pullfill_test_page_seconds", "pullfill_test_page_things"} <= names


def test_openmetrics_with_the_last_trace_of_each_bucket(observed: None) -> None:
    body, kind = page(PROMETHEUS)
    assert kind == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert b"_created" not in body
    assert body.decode().endswith(END)
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
