"""Alerts and the dashboard name what exists; alerts fire, and KEDA scales, when they must."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from pullfill.frontend.counters import WORKERS_NEEDED
from pullfill.frontend.routes import show_needed
from pullfill.needs import BOTH, DECODE, PREFILL, PlanSettings, observe, plan
from pullfill.snapshot import Cluster, Demand, WorkerRow
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


def test_the_dashboard_shows_one_cluster_of_several() -> None:
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
@pytest.mark.parametrize("frontends", [("a",), ("a", "b")], ids=["frontend", "frontends"])
@pytest.mark.parametrize("both", [0, 2], ids=["split", "both"])
@pytest.mark.essential
def test_keda_scales_as_the_planner_says(
    both: int, frontends: tuple[str, ...], tmp_path: Path
) -> None:
    """The queries of the chart return what `pullfill plan` calls right. No figures make no number,
    which KEDA takes for an error, with another cluster beside, too."""
    values = {"pullfillNamespace": "here", "keda": {"enabled": True}, "worker": {"replicas": both}}
    triggers = {
        name.removeprefix("pullfill-"): one["spec"]["triggers"][0]
        for name, one in of_kind(render(**values), "ScaledObject").items()
    }
    tests = []
    for busy, backlog, prefills in ((0.0, 0.0, 0), (0.2, 3.0, 1), (2.0, 5.0, 2), (1.9, 47.0, 3),
                                    (0.1, 100.0, 0)):  # fmt: skip
        demand = Demand(backlog_s=backlog, prefill_demand=busy, pressure=0.7)
        rows = [("prefill", f"p{n}") for n in range(prefills)] + [
            ("decode", "d1"),
            ("decode", "d2"),
        ]
        rows += [("prefill", f"d{n + 1}") for n in range(both)]
        told = {"demand": msgspec.to_builtins(demand)}
        cluster = Cluster(
            workers=tuple(
                WorkerRow(instance_id=name, role=role, state="ready", load=told)
                for role, name in rows
            )
        )
        show_needed(cluster)
        needs = plan(observe(cluster), PlanSettings()).needs
        right = {need.kind: need.right for need in needs if need.kind in triggers}
        assert set(right) == set(triggers)
        shown = {
            f'pullfill_workers_needed{{kind="{s.labels["kind"]}",instance="{one}",{HERE}}}': s.value
            for family in WORKERS_NEEDED.collect() for s in family.samples for one in frontends
        }  # fmt: skip
        tests.append(case(shown | THERE, triggers, right))
    show_needed(Cluster())
    assert not [family.samples for family in WORKERS_NEEDED.collect() if family.samples]
    tests.append(case(THERE, triggers, {}))
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump({"tests": tests}))
    promtool("test", "rules", str(tmp_path / "cases.yaml"))


HERE = 'pullfill_namespace="here"'
THERE = {
    f'pullfill_workers_needed{{kind="{kind}",pullfill_namespace="there"}}': 50.0
    for kind in (DECODE, PREFILL, BOTH)
}


def case(
    series: dict[str, float], triggers: dict[str, Any], right: dict[str, int]
) -> dict[str, Any]:
    """A test for promtool: what each query makes of these series."""
    expected = {kind: [{"labels": "{}", "value": value}] for kind, value in right.items()}
    return {
        "interval": "15s",
        "input_series": [{"series": s, "values": f"{value}x2"} for s, value in series.items()],
        "promql_expr_test": [
            {
                "expr": trigger["metadata"]["query"],
                "eval_time": "15s",
                "exp_samples": expected.get(kind, []),
            }
            for kind, trigger in triggers.items()
        ],
    }
