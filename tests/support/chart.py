"""The Helm chart of deploy/kubernetes/pullfill, rendered by Helm itself.

Helm is Go code, whose runtime does not survive a fork. Tests run in forked processes, so Helm has a
process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.support.late import Late

helm: Any = Late("helm_python")
CHART = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes" / "pullfill"
RELEASE = "pullfill"
_RENDER = """
import helm_python as helm, json, sys
values = json.loads(sys.stdin.read())
try:
    with helm.Chart.load(sys.argv[1]) as chart:
        chart.validate_schema(values)
        print(json.dumps(chart.render(values, name=sys.argv[2], namespace="serving")))
except helm.HelmError as exc:
    sys.exit(f"HelmError: {exc}")
"""
_LINT = "import helm_python as helm, json, sys; print(json.dumps(helm.lint(sys.argv[1])))"


class HelmRefused(Exception):
    """Helm refuses the chart with these values."""


def render(**values: Any) -> list[dict[str, Any]]:
    """Return the Kubernetes objects that `helm install pullfill CHART --namespace serving` would
    create with these values. Calls share the result, so do not change it. Raises HelmRefused."""
    return _render(json.dumps(values))


@cache
def _render(values: str) -> list[dict[str, Any]]:
    files: dict[str, str] = _helm(_RENDER, str(CHART), RELEASE, stdin=values)
    texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


def lint() -> dict[str, Any]:
    """Return what `helm lint` prints of the chart."""
    found: dict[str, Any] = _helm(_LINT, str(CHART))
    return found


def _helm(code: str, *arguments: str, stdin: str = "") -> Any:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise HelmRefused(done.stderr)
    return json.loads(done.stdout)


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
