"""deploy/prometheus/alerts.yaml names metrics, labels and label values that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

from pullfill import wire
from tests.support.metrics import labels_of_metrics
from tests.support.prometheus import missing, promtool

CASES = Path(__file__).resolve().parent / "alerts.test.yaml"
ALERTS = Path(__file__).resolve().parents[3] / "deploy" / "prometheus" / "alerts.yaml"


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return list(group["rules"])


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


needs_promtool = pytest.mark.skipif(bool(missing()), reason=missing())


@needs_promtool
def test_promtool_takes_the_rules() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", str(ALERTS))


@needs_promtool
def test_each_alert_fires_when_it_must_and_not_before() -> None:
    """alerts.test.yaml: input series beside the alerts that promtool must find at some minute."""
    cases = yaml.safe_load(CASES.read_text())["tests"]
    told = [
        (one["alertname"], bool(one["exp_alerts"])) for c in cases for one in c["alert_rule_test"]
    ]
    assert set(told) == {(rule["alert"], fires) for rule in rules() for fires in (True, False)}
    promtool("test", "rules", str(CASES))


@needs_promtool
def test_promtool_finds_nothing_wrong_with_our_names() -> None:
    promtool("check", "metrics", stdin=generate_latest().decode())
