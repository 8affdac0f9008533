"""Alerts and the dashboard name what exists; alerts fire, and KEDA scales, when they must."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pullfill.deploy import planner
from pullfill.snapshot import Demand
from tests.support.chart import of_kind, render
from tests.support.metrics import EVERYWHERE, labels_of_metrics
from tests.support.prometheus import dashboard, missing, promtool

CASES = Path(__file__).resolve().parent / "alerts.test.yaml"
ALERTS = Path(__file__).resolve().parents[3] / "deploy" / "prometheus" / "alerts.yaml"


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return list(group["rules"])


TARGETS = [target for panel in dashboard()["panels"] for target in panel.get("targets", ())]
QUERIES = [(rule["expr"], rule["annotations"]["summary"]) for rule in rules()]
QUERIES += [(target["expr"], target["legendFormat"]) for target in TARGETS]


@pytest.mark.parametrize(("query", "text"), QUERIES, ids=lambda text: text[:60])
@pytest.mark.essential
def test_a_query_names_what_exists(query: str, text: str) -> None:
    """text: what is told of it. vLLM's names: tests/integration/test_prometheus.py."""
    real = labels_of_metrics()
    found = re.findall(r"(pullfill_\w+?|vllm:\w+?)(?:_bucket)?\b", query)
    names = {name for name in found if name.startswith("pullfill_")} - EVERYWHERE
    assert found
    assert names <= set(real)
    used = set(re.findall(r"(\w+)!?=~?\"", query)) | set(
        re.findall(r"{{ ?(?:\$labels\.)?(\w+)", text)
    )
    for group in re.findall(r"by \(([^)]*)\)", query):
        used |= {label.strip() for label in group.split(",")}
    assert used - {"le"} - EVERYWHERE <= set().union(*(real[name] for name in names))
    assert query.count("(") == query.count(")")
    if any("instance_id" in real[name] for name in names):
        # The page of every frontend has what a worker reports.
        for inner in re.findall(r"\bsum(?: by \([^)]*\))? \((?=(.*))", query):
            assert re.match(r"max by \([^)]*instance_id", inner)


def test_clusters_in_one_prometheus_are_told_apart() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in {"critical", "warning"}
        told_apart = re.findall(r"(?:sum|max|min|count) by \(pullfill_namespace\b", rule["expr"])
        assert len(told_apart) == len(re.findall(r"\b(?:sum|max|min|count)\b", rule["expr"]))
    for target in TARGETS:
        series = len(re.findall(r"(?:pullfill_\w+|vllm:\w+){", target["expr"]))
        assert 0 < series == target["expr"].count('{pullfill_namespace="$cluster"')
    (chosen,) = [v for v in dashboard()["templating"]["list"] if v["name"] == "cluster"]
    assert (chosen["type"], chosen["multi"], chosen["includeAll"]) == ("query", False, False)
    known = re.fullmatch(r"label_values\((\w+), (\w+)\)", chosen["query"]["query"])
    assert known
    assert known[2] in labels_of_metrics()[known[1]]


needs_promtool = pytest.mark.skipif(bool(missing()), reason=missing())


@needs_promtool
def test_promtool_takes_the_rules() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", str(ALERTS))


@needs_promtool
def test_promtool_reads_each_query_of_the_dashboard(tmp_path: Path) -> None:
    queries = [target["expr"].replace("$__rate_interval", "1m") for target in TARGETS]
    read = [{"record": f"q:{n}", "expr": query} for n, query in enumerate(queries)]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": read}]}))
    promtool("check", "rules", str(file))


WELL = {
    'pullfill_frontend_decode_workers{state="ready",X}': "1x200",
    'pullfill_kv_credits_bytes{role="prefill",what="limit",X}': "1x200",
    'pullfill_up{server="nats",X}': "1x200", "pullfill_queue_oldest_age_seconds{X}": "0x200",
    'pullfill_decision_total{path="remote",X}': "0+900x200",
    'pullfill_fallback_total{cause="timeout",X}': "0x200",
    'pullfill_quarantined_blocks{instance_id="d",X}': "0x200",
    'pullfill_dead_letter_total{instance_id="p",X}': "0x200",
}  # fmt: skip
"""The series of a second cluster in which all is well. X: the label that tells it apart."""


@needs_promtool
@pytest.mark.parametrize("beside", [{}, WELL], ids=["alone", "beside"])
@pytest.mark.essential
def test_each_alert_fires_when_it_must_and_not_before(
    beside: dict[str, str], tmp_path: Path
) -> None:
    """alerts.test.yaml: input series beside the alerts that promtool must find at some minute."""
    cases = yaml.safe_load(CASES.read_text())
    told = [
        (one["alertname"], bool(one["exp_alerts"]))
        for case in cases["tests"]
        for one in case["alert_rule_test"]
    ]
    assert set(told) == {(rule["alert"], fires) for rule in rules() for fires in (True, False)}
    cases["rule_files"] = [str(ALERTS)]
    if beside:
        cases["tests"] = [case for case in cases["tests"] if case["input_series"]]
    for case in cases["tests"]:
        case["input_series"] += [
            {"series": name.replace("X", 'pullfill_namespace="there"'), "values": values}
            for name, values in beside.items()
        ]
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(cases))
    promtool("test", "rules", str(tmp_path / "cases.yaml"))


@needs_promtool
@pytest.mark.parametrize("told_by", [("a",), ("a", "b")], ids=["frontend", "frontends"])
@pytest.mark.essential
def test_keda_scales_as_the_planner_says(told_by: tuple[str, ...], tmp_path: Path) -> None:
    """The queries of the chart return the planner's needs. No figures make no number, which KEDA
    takes for an error, with another cluster beside, too."""
    objects = of_kind(render(pullfillNamespace="here", keda={"enabled": True}), "ScaledObject")
    queries = {
        role: objects[f"pullfill-{role}"]["spec"]["triggers"][0]["metadata"]["query"]
        for role in (planner.PREFILL, planner.DECODE)
    }
    tests = []
    for busy, backlog, prefills in ((0.0, 0.0, 0), (0.2, 3.0, 1), (2.0, 5.0, 2), (1.9, 47.0, 3),
                                    (0.1, 100.0, 0)):  # fmt: skip
        demands = {
            f"d{n}": Demand(backlog_s=backlog, prefill_demand=busy, pressure=0.7) for n in (1, 2)
        }
        seen = planner.Observation(prefills, len(demands), 0, demands)
        found = planner.plan(seen, planner.PlanSettings())
        series = dict(THERE)
        for frontend in told_by:
            for name, one in demands.items():
                labels = f'role="decode",instance_id="{name}",instance="{frontend}",{HERE}'
                series[f"pullfill_prefill_demand{{{labels}}}"] = one.prefill_demand
                series[f"pullfill_backlog_seconds{{{labels}}}"] = one.backlog_s
                series[f"pullfill_decode_pressure{{{labels}}}"] = one.pressure
            for n in range(prefills):
                labels = f'role="prefill",what="limit",instance_id="p{n}",instance="{frontend}"'
                series[f"pullfill_kv_credits_bytes{{{labels},{HERE}}}"] = 1.0
        tests.append(case(series, queries, {need.role: need for need in found.needs}))
    tests.append(case(THERE, queries, {}))
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump({"tests": tests}))
    promtool("test", "rules", str(tmp_path / "cases.yaml"))


HERE = 'pullfill_namespace="here"'
THERE = {
    f'{name}{{role="decode",instance_id="d9",pullfill_namespace="there"}}': 50.0
    for name in ("pullfill_prefill_demand", "pullfill_backlog_seconds", "pullfill_decode_pressure")
}


def case(
    series: dict[str, float], queries: dict[str, str], needs: dict[str, planner.Need]
) -> dict[str, Any]:
    """A test for promtool: what each query makes of these series."""
    expected = {r: [{"labels": "{}", "value": n.need}] for r, n in needs.items()}
    return {
        "interval": "15s",
        "input_series": [{"series": s, "values": f"{value}x2"} for s, value in series.items()],
        "promql_expr_test": [
            {"expr": query, "eval_time": "15s", "exp_samples": expected.get(role, [])}
            for role, query in queries.items()
        ],
    }
