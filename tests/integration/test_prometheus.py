"""What a frontend of a real cluster tells Prometheus."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families as plain

from tests.support import web
from tests.support.cluster import Cluster
from tests.support.metrics import labels_of_metrics
from tests.support.prometheus import dashboard
from tests.support.prompts import ask, random_prompt

pytestmark = pytest.mark.engine

WORDS = re.compile(r"[a-z][a-z0-9_]*")
IDS = {"instance_id", "le", "model_name", "engine", "pullfill_namespace"}
QUERIES = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]


@pytest.mark.essential
def test_labels_are_words_of_a_closed_set(cluster: Cluster) -> None:
    """No id of a request, job or peer, whatever came over a wire."""
    for policy, length in (("always_remote", 200), ("always_local", 40)):
        cluster.set_router(policy=policy)
        ask(cluster, random_prompt(length, seed=70), 4)
    page = web.get(f"{cluster.frontend_url}/metrics")
    assert "_created" not in page.text
    families = [f for f in plain(page.text) if f.name.startswith("pullfill_")]
    samples = [sample for family in families for sample in family.samples]
    assert len(samples) > 100
    for sample in samples:
        for name, value in sample.labels.items():
            assert name in IDS or WORDS.fullmatch(value), sample
    known = cluster.records("decode").keys() | cluster.records("prefill").keys()
    assert {s.labels["instance_id"] for s in samples if "instance_id" in s.labels} <= known
    needed = {s.labels["kind"]: s.value for s in samples if s.name == "pullfill_workers_needed"}
    workers = {name for name, labels in labels_of_metrics().items() if "instance_id" in labels}
    own = {s.name for s in samples if "instance_id" not in s.labels}
    assert own & workers == {"pullfill_up"}, "a frontend has no worker's metrics of its own"
    # How many depends on what the tests before asked of this cluster, and on how slow it was.
    assert needed.keys() == {"decode", "prefill"}
    assert min(needed.values()) >= 1, "long prompts came within 30 s"
    asked = {n for query in QUERIES for n in re.findall(r"vllm:\w+", query)}
    assert asked
    assert asked <= set(re.findall(r"^(vllm:\w+)", page.text, re.M)), "names of vLLM's own"
