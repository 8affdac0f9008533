"""The Helm chart of deploy/kubernetes/pullfill, rendered by Helm itself.

Helm is Go code, whose runtime does not survive a fork. Tests run in forked processes, so Helm has a
process of its own. It serves all tests of the process that started it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes" / "pullfill"
RELEASE = "pullfill"
_SERVE = """
import json, sys
import helm_python as helm

for line in sys.stdin:
    values = json.loads(line)
    try:
        with helm.Chart.load(sys.argv[1]) as chart:
            chart.validate_schema(values)
            told = chart.render(values, name=sys.argv[2], namespace="serving")
    except helm.HelmError as exc:
        told = str(exc)
    print(json.dumps(told), flush=True)
"""


class HelmRefused(Exception):
    """Helm refuses the chart with these values."""


def render(**values: Any) -> list[dict[str, Any]]:
    """Return the Kubernetes objects that `helm install pullfill CHART --namespace serving` would
    create with these values. Calls share the result, so do not change it. Raises HelmRefused."""
    return _render(json.dumps(values))


@cache
def _render(values: str) -> list[dict[str, Any]]:
    helm = _process()
    print(values, file=helm.stdin, flush=True)
    told: str | dict[str, str] = json.loads(helm.stdout.readline())
    if isinstance(told, str):
        raise HelmRefused(told)
    texts = [text for name, text in sorted(told.items()) if name.endswith(".yaml")]
    return [one for text in texts for one in yaml.load_all(text, yaml.CSafeLoader) if one]


@cache
def _process() -> subprocess.Popen[str]:
    """Helm. It ends with this process, whose end closes the pipe."""
    return subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(CHART), RELEASE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def of_kind(documents: list[dict[str, Any]], *kinds: str) -> dict[str, dict[str, Any]]:
    """Return the objects of these kinds by name."""
    return {d["metadata"]["name"]: d for d in documents if d["kind"] in kinds}


def pods(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Name → pod template, of all that runs pods for long."""
    workloads = of_kind(documents, "Deployment", "StatefulSet")
    return {name: one["spec"]["template"] for name, one in workloads.items()}


def the_container(template: dict[str, Any]) -> dict[str, Any]:
    (container,) = template["spec"]["containers"]
    return dict(container)
