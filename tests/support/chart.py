"""The Helm chart of deploy/kubernetes/pullfill, rendered by Helm itself."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.support.late import Late

helm: Any = Late("helm_python")
CHART = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes" / "pullfill"
RELEASE = "pullfill"


def render(**values: Any) -> list[dict[str, Any]]:
    """All objects of `helm install pullfill CHART --namespace serving` with these values. Do not
    change them."""
    return _render(json.dumps(values))


@cache
def _render(values: str) -> list[dict[str, Any]]:
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(json.loads(values))
        files = chart.render(json.loads(values), name=RELEASE, namespace="serving")
    texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


def of_kind(documents: list[dict[str, Any]], *kinds: str) -> dict[str, dict[str, Any]]:
    """Name → object."""
    return {d["metadata"]["name"]: d for d in documents if d["kind"] in kinds}


def pods(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Name → pod template, of all that runs pods for long."""
    workloads = of_kind(documents, "Deployment", "StatefulSet")
    return {name: one["spec"]["template"] for name, one in workloads.items()}


def the_container(template: dict[str, Any]) -> dict[str, Any]:
    (container,) = template["spec"]["containers"]
    return dict(container)
