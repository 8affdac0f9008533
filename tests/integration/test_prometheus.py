"""A real Prometheus scrapes a real cluster: names, labels, queries, rules."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics

from tests.support.chart import of_kind, render
from tests.support.cluster import Cluster
from tests.support.metrics import EVERYWHERE
from tests.support.prometheus import Prometheus, dashboard, missing, promtool
from tests.support.prompts import ask, random_prompt

pytestmark = pytest.mark.engine

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
WORDS = re.compile(r"[a-z][a-z0-9_]*")
IDS = {"instance_id", "le", "model_name", "engine", "pullfill_namespace"}


@pytest.fixture
def used(cluster: Cluster) -> Cluster:
    """It has served a prompt of each kind."""
    for number in range(2):
        ask(cluster, random_prompt(200, seed=70 + number), 4)
    cluster.set_router(policy="always_local")
    ask(cluster, random_prompt(40, seed=73), 4)
    return cluster


@pytest.mark.essential
def test_labels_are_words_of_a_closed_set(used: Cluster) -> None:
    """No id of a request, job or peer, whatever came over a wire."""
    url = f"{used.frontend_url}/metrics"
    page = httpx.get(url, headers={"accept": "application/openmetrics-text"}, trust_env=False)
    assert page.headers["content-type"].startswith("application/openmetrics-text")
    assert "_created" not in page.text
    families = [f for f in openmetrics(page.text) if f.name.startswith("pullfill_")]
    samples = [sample for family in families for sample in family.samples]
    assert len(samples) > 100
    for sample in samples:
        for name, value in sample.labels.items():
            assert name in IDS or WORDS.fullmatch(value), sample
    known = {
        record.instance_id
        for role in ("decode", "prefill")
        for record in used.records(role).values()
    }
    assert {s.labels["instance_id"] for s in samples if "instance_id" in s.labels} <= known


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_prometheus_answers_every_query_of_the_dashboard(used: Cluster, tmp_path: Path) -> None:
    page = httpx.get(f"{used.frontend_url}/metrics", trust_env=False).text
    promtool("check", "metrics", stdin=ours(page))
    target = used.frontend_url.removeprefix("http://")
    with Prometheus(tmp_path / "prometheus", [target], ALERTS) as prometheus:
        prometheus.wait_for("rate(vllm:generation_tokens_total[10s])")
        ask(used, random_prompt(50, seed=74), 4)
        values = {"pullfillNamespace": used.namespace, "keda": {"enabled": True}}
        queries = [
            trigger["metadata"]["query"]
            for one in of_kind(render(**values), "ScaledObject").values()
            for trigger in one["spec"]["triggers"]
        ]
        for panel in dashboard()["panels"]:
            queries += [target["expr"] for target in panel.get("targets", ())]
        empty = set()
        for query in queries:
            query = query.replace("$__rate_interval", "10s").replace("$cluster", used.namespace)
            if not prometheus.query(query):
                empty |= set(re.findall(r"pullfill_\w+|vllm:\w+", query)) - EVERYWHERE
        assert all(text not in empty for text in empty - RARE), empty - RARE
        (group,) = prometheus.get("/rules")["groups"]
        assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
        (scraped,) = prometheus.get("/targets")["activeTargets"]
        assert (scraped["health"], scraped["lastError"]) == ("up", "")


RARE = {
    "pullfill_prefix_fetch_total", "pullfill_fallback_total", "pullfill_auth_refused_total",
    "pullfill_frontend_migrated_total", "pullfill_frontend_refused_total",
    "pullfill_kv_read_bytes_total",
}  # fmt: skip
"""What has no sample before it happens for the first time."""


def ours(page: str) -> str:
    """The lines about our metrics. vLLM has a colon in its names, which promtool takes amiss."""
    lines = (line for line in page.splitlines() if re.match(r"(# \w+ )?pullfill_", line))
    return "\n".join(lines) + "\n"
