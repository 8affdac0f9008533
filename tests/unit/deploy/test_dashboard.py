"""deploy/prometheus/dashboard.json is what deploy/dashboard.py makes, of metrics that exist."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pullfill.deploy import dashboard
from tests.support.metrics import labels_of_metrics

QUERIES = [q for plots in dashboard.ROWS.values() for plot in plots for q in plot.queries]


def test_the_file_is_what_the_module_makes() -> None:
    made = dashboard.make()
    assert dashboard.FILE.read_text() == made, "run python -m pullfill.deploy.dashboard"


def test_grafana_finds_each_query_once_and_all_panels_have_room() -> None:
    made: dict[str, Any] = json.loads(dashboard.make())
    panels = [p for p in made["panels"] if p["type"] != "row"]
    assert len({p["title"] for p in panels}) == len(panels)
    assert [t["expr"] for p in panels for t in p["targets"]] == [q.text for q in QUERIES]
    places = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in made["panels"]}
    assert len(places) == len(made["panels"])
    assert all(p["datasource"]["uid"] == "${datasource}" for p in panels)


@pytest.mark.parametrize("query", QUERIES, ids=lambda q: q.text[:60])
def test_a_query_names_what_exists(query: dashboard.Query) -> None:
    """vLLM's names are checked on a real page: tests/integration/test_prometheus.py."""
    real = labels_of_metrics()
    names = re.findall(r"pullfill_\w+", query.text)
    assert names or "vllm:" in query.text
    bare = {name.removesuffix("_bucket") for name in names}
    assert bare <= set(real)
    used = set(re.findall(r"(\w+)=~?\"", query.text)) | set(re.findall(r"{{(\w+)}}", query.legend))
    for group in re.findall(r"by \(([^)]*)\)", query.text):
        used |= {label.strip() for label in group.split(",")}
    assert used - {"le"} <= set().union(*(real[name] for name in bare), {"le"})


def test_no_worker_is_counted_once_for_each_frontend() -> None:
    """What a worker reports has its instance id in the page of every frontend."""
    real = labels_of_metrics()
    for query in QUERIES:
        for name in set(re.findall(r"pullfill_[a-z_]+", query.text)):
            of_worker = "instance_id" in real.get(name.removesuffix("_bucket"), ())
            if of_worker and query.text.startswith(("sum", "histogram_quantile")):
                assert "max by (instance_id" in query.text, query.text
