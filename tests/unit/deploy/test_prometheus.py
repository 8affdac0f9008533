"""deploy/prometheus/alerts.yaml names metrics, labels and label values that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import yaml

from pullfill import wire
from pullfill.frontend import metrics as frontend_metrics
from pullfill.runtime import metrics

ALERTS = Path(__file__).resolve().parents[3] / "deploy" / "prometheus" / "alerts.yaml"
MERGED = {"instance_id", "role"}
"""Labels that a frontend adds to what workers report."""


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return list(group["rules"])


def labels_of_metrics() -> dict[str, set[str]]:
    found = {}
    for module, more in ((metrics, MERGED), (frontend_metrics, set())):
        for metric in vars(module).values():
            if isinstance(metric, prometheus_client.metrics.MetricWrapperBase):
                (family,) = metric.describe()
                name = family.name + ("_total" if family.type == "counter" else "")
                found[name] = set(metric._labelnames) | more
    return found


@pytest.mark.parametrize("rule", rules(), ids=lambda r: r["alert"])
def test_an_alert_names_what_exists(rule: dict[str, Any]) -> None:
    real = labels_of_metrics()
    names = re.findall(r"pullfill_\w+", rule["expr"])
    assert names
    assert set(names) <= set(real)
    labels = set(re.findall(r"(\w+)=~?\"", rule["expr"]))
    for group in re.findall(r"by \(([^)]*)\)", rule["expr"]):
        labels |= {name.strip() for name in group.split(",")}
    labels |= set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    assert labels <= set().union(*(real[name] for name in names))
    assert rule["expr"].count("(") == rule["expr"].count(")")
    assert rule["labels"]["severity"] in {"critical", "warning"}


def test_no_worker_is_counted_once_for_each_frontend() -> None:
    for rule in rules():
        for inner in re.findall(r"sum\((.*?pullfill_)", rule["expr"]):
            assert inner.startswith("max by (instance_id"), rule["alert"]


def test_the_age_is_the_default_claim_timeout() -> None:
    (rule,) = [r for r in rules() if r["alert"] == "PullfillQueueOld"]
    assert float(rule["expr"].rpartition("> ")[2]) == wire.RouterConfig().claim_timeout_s


def test_seven_alerts() -> None:
    assert len(rules()) == 7
