"""deploy/prometheus/dashboard.json asks for metrics and labels that exist."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.metrics import EVERYWHERE, labels_of_metrics
from tests.support.prometheus import dashboard

PANELS = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
TARGETS = [target for panel in PANELS for target in panel["targets"]]
ONE_CLUSTER = '{pullfill_namespace="$cluster"'


def metrics_of(query: str) -> set[str]:
    return set(re.findall(r"pullfill_\w+", query)) - EVERYWHERE


def test_one_cluster_is_chosen_among_those_that_prometheus_knows() -> None:
    (chosen,) = [v for v in dashboard()["templating"]["list"] if v["name"] == "cluster"]
    assert (chosen["type"], chosen["multi"], chosen["includeAll"]) == ("query", False, False)
    known = re.fullmatch(r"label_values\((\w+), (\w+)\)", chosen["query"]["query"])
    assert known
    assert known[2] in labels_of_metrics()[known[1]]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target["expr"][:60])
@pytest.mark.essential
def test_a_query_names_what_exists(target: dict[str, Any]) -> None:
    """vLLM's names are checked on a real page: tests/integration/test_prometheus.py."""
    real, query = labels_of_metrics(), target["expr"]
    selected = re.findall(r"((?:pullfill_|vllm:)\w+)(\{[^}]*)?", query)
    found = [(name, labels) for name, labels in selected if name not in EVERYWHERE]
    assert found
    assert all(labels.startswith(ONE_CLUSTER) for _, labels in found)
    bare = {name.removesuffix("_bucket") for name in metrics_of(query)}
    assert bare <= set(real)
    legend = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
    used = set(re.findall(r"(\w+)=~?\"", query)) | legend
    for group in re.findall(r"by \(([^)]*)\)", query):
        used |= {label.strip() for label in group.split(",")}
    assert used - {"le"} - EVERYWHERE <= set().union(*(real[name] for name in bare))


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target["expr"][:60])
def test_no_worker_is_counted_once_for_each_frontend(target: dict[str, Any]) -> None:
    """What a worker reports has its instance id in the page of every frontend."""
    query = target["expr"]
    for name in metrics_of(query):
        of_worker = "instance_id" in labels_of_metrics()[name.removesuffix("_bucket")]
        if of_worker and query.startswith(("sum", "histogram_quantile")):
            assert "max by (instance_id" in query
