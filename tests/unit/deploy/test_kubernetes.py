"""The Helm chart: the real command line, NATS and etcd take what its pods run.

No Kubernetes here. Helm itself renders the chart; test_kubernetes_schema.py validates the objects.
"""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import AsyncMock
from urllib.parse import urlsplit

import pytest
import yaml

from pullfill.config import split_urls
from pullfill.deploy import cli
from pullfill.deploy.planner import PlanSettings
from pullfill.registry import live_settings
from pullfill.runtime.lifecycle import EXIT_S
from pullfill.wire import QueueSettings
from tests.support.chart import CHART, of_kind, pods, render, the_container
from tests.support.flags import expand, parse

WORKERS = {"decode", "prefill"}
ROLES = WORKERS | {"frontend"}
OURS = {f"pullfill-{r}" for r in ROLES}
SERVERS = {"pullfill-nats", "pullfill-etcd"}
SECRET = {"securitySecret": "keys"}


def arguments(container: dict[str, Any]) -> list[str]:
    return [expand(a, {"POD_IP": "10.0.0.7"}, r"\$\((\w+)\)") for a in container["args"]]


def members(name: str) -> set[str]:
    """Names under which the pods of a StatefulSet are known."""
    found = of_kind(render(), "StatefulSet")[name]
    service = of_kind(render(), "Service")[found["spec"]["serviceName"]]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    return {f"{name}-{i}.{service['metadata']['name']}" for i in range(found["spec"]["replicas"])}


def hosts(urls: str, port: int) -> set[str]:
    """Host names of `urls`, each of which names this port."""
    found = [urlsplit(url) for url in split_urls(urls)]
    assert {one.port for one in found} == {port}
    return {str(one.hostname) for one in found}


@pytest.mark.parametrize("role", sorted(ROLES))
def test_a_pods_command_line(role: str) -> None:
    template = pods(render())[f"pullfill-{role}"]
    container = the_container(template)
    env = {e["name"]: e["valueFrom"] for e in container["env"]}
    assert env["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    options = parse(arguments(container))
    assert container["args"][0] == role
    assert hosts(options["etcd"], 2379) == members("pullfill-etcd")
    assert hosts(options["nats"], 4222) == members("pullfill-nats")
    assert options["model"] == "Qwen/Qwen2.5-0.5B-Instruct"
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    if role == "frontend":
        assert ports == {"http": options["port"]}
        assert options["advertise"] == f"http://10.0.0.7:{options['port']}"
    else:
        known = ("http", "kv", "control", "data")
        assert ports == {n: options[f"{n}_port"] for n in known if f"{n}_port" in options}
        assert {"http", "kv"} <= set(ports)
        assert options["host"] == "10.0.0.7"
        assert env["OMP_NUM_THREADS"]["resourceFieldRef"]
        assert env["POD_NAME"] == {"fieldRef": {"fieldPath": "metadata.name"}}


@pytest.mark.parametrize("drain", [60, 600])
@pytest.mark.essential
def test_kubernetes_waits_longer_than_a_drain(drain: int) -> None:
    """SIGTERM drains. A frontend first waits until the Service sends it no more connections."""
    values: dict[str, Any] = {"drainTimeoutSeconds": drain}
    templates = pods(render(**values, frontend=values))
    for role in ROLES:
        template = templates[f"pullfill-{role}"]
        options = parse(arguments(the_container(template)))
        assert options["drain_timeout"] == drain
        assert "lifecycle" not in the_container(template)
        ready = options["ready_grace"] if role == "frontend" else 0.0
        assert template["spec"]["terminationGracePeriodSeconds"] >= ready + drain + EXIT_S


def test_the_values_for_gpus() -> None:
    documents = render(**yaml.safe_load((CHART / "values-gpu.yaml").read_text()))
    for role in WORKERS:
        container = the_container(pods(documents)[f"pullfill-{role}"])
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
        # vLLM's own defaults: all of the GPU, and CUDA graphs.
        assert not [a for a in container["args"] if "eager" in a or "kv-cache" in a]
        # An upgrade ends also with every GPU taken.
        strategy = of_kind(documents, "Deployment")[f"pullfill-{role}"]["spec"]["strategy"]
        assert strategy == {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
        policy = of_kind(documents, "NetworkPolicy")[f"pullfill-{role}"]["spec"]["ingress"]
        (ours,) = [rule for rule in policy if "ports" not in rule]
        assert ours["from"][0]["podSelector"]["matchExpressions"], "workers alone, on all ports"


def test_probes_and_rights() -> None:
    for name, template in pods(render(**SECRET)).items():
        container = the_container(template)
        probes = {k: p["httpGet"] for k, p in container.items() if k.endswith("Probe")}
        assert {p["port"] for p in probes.values()} <= {p["name"] for p in container["ports"]}
        if name in OURS:
            assert [probes[f"{kind}Probe"]["path"] for kind in ("startup", "liveness")] == [
                "/live", "/live",
            ]  # fmt: skip
            assert probes["readinessProbe"]["path"] == "/ready"
        elif name == "pullfill-nats":
            # A server that waits for the others must not be restarted for it.
            assert probes["livenessProbe"]["path"] == "/healthz?js-enabled-only=true"
            assert probes["readinessProbe"]["path"] == "/healthz?js-server-only=true"
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_what_selects_pods_finds_them() -> None:
    """Services, disruption budgets and network policies."""
    templates = pods(render())

    def found(selector: dict[str, Any]) -> set[str]:
        wanted = selector.get("matchLabels", {}).items()
        rules = selector.get("matchExpressions", [])
        has = {name: template["metadata"]["labels"] for name, template in templates.items()}
        return {
            name for name in has if wanted <= has[name].items()
            and all(has[name].get(r["key"]) in r["values"] for r in rules)
        }  # fmt: skip

    services = of_kind(render(), "Service")
    assert set(services) == SERVERS | {"pullfill-frontend"}
    for name, service in services.items():
        assert found({"matchLabels": service["spec"]["selector"]}) == {name}
        named = {p["name"] for p in the_container(templates[name])["ports"]}
        assert {p["targetPort"] for p in service["spec"]["ports"]} <= named
    for kind, key in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        objects = of_kind(render(), kind)
        assert set(objects) == OURS | SERVERS
        assert all(found(one["spec"][key]) == {name} for name, one in objects.items())
    allowed = {
        (name, port["port"]): [found(peer["podSelector"]) for peer in rule.get("from", [])]
        for name, policy in of_kind(render(), "NetworkPolicy").items()
        for rule in policy["spec"]["ingress"]
        for port in rule["ports"]
    }
    workers = {f"pullfill-{w}" for w in WORKERS}
    front = {"pullfill-frontend"}
    assert allowed == {
        ("pullfill-frontend", "http"): [],
        ("pullfill-decode", "control"): [workers], ("pullfill-decode", "kv"): [workers],
        ("pullfill-decode", "data"): [front], ("pullfill-decode", "http"): [front],
        ("pullfill-prefill", "kv"): [workers], ("pullfill-prefill", "http"): [front],
        ("pullfill-nats", "client"): [OURS], ("pullfill-nats", "cluster"): [{"pullfill-nats"}],
        ("pullfill-etcd", "client"): [OURS], ("pullfill-etcd", "peer"): [{"pullfill-etcd"}],
    }  # fmt: skip


# ------------------------------------------------------------------ servers


def test_the_servers_are_three_and_the_streams_have_as_many_replicas() -> None:
    found = of_kind(render(), "StatefulSet")
    assert {name: one["spec"]["replicas"] for name, one in found.items()} == dict.fromkeys(
        SERVERS, 3
    )
    for one in found.values():
        assert one["spec"]["podManagementPolicy"] == "Parallel", "one alone never becomes ready"
        assert one["spec"]["volumeClaimTemplates"]
    (job,) = of_kind(render(**SECRET), "Job").values()
    container = the_container(job["spec"]["template"])
    assert container["args"][:2] == ["config", "set"]
    command = cli.config.commands["set"]
    told = command.make_context("set", container["args"][2:]).params
    assert live_settings.find(told["key"]) == (QueueSettings, "replicas")
    etcd: Any = AsyncMock()
    etcd.get.return_value = None
    stored = live_settings.Settings(etcd, "n", QueueSettings).set("replicas", told["value"])
    assert asyncio.run(stored).replicas == 3
    assert hosts(told["etcd"], 2379) == members("pullfill-etcd")
    assert told["namespace"] == options_of(render())["namespace"]


# ------------------------------------------------------------------ KEDA


def test_keda_scales_deployments_that_exist() -> None:
    assert not of_kind(render(), "ScaledObject")
    documents = render(keda={"enabled": True})
    scaled = of_kind(documents, "ScaledObject")
    assert set(scaled) == {"pullfill-prefill", "pullfill-decode"}
    deployments = of_kind(documents, "Deployment")
    assert {n for n, d in deployments.items() if "replicas" not in d["spec"]} == set(scaled), (
        "an upgrade would undo what KEDA has done"
    )
    for name, one in scaled.items():
        spec = one["spec"]
        assert spec["scaleTargetRef"]["name"] == name
        least = (
            PlanSettings().min_prefill if name == "pullfill-prefill" else PlanSettings().min_decode
        )
        assert spec["minReplicaCount"] == least < spec["maxReplicaCount"]
        # A fallback to 0 makes KEDA remove all workers, and it needs AverageValue and a threshold
        # that is a whole number.
        assert spec["fallback"] == {
            "failureThreshold": 3, "replicas": 1, "behavior": "currentReplicas",
        }  # fmt: skip
        (trigger,) = spec["triggers"]
        assert (trigger["type"], trigger["metricType"]) == ("prometheus", "AverageValue")
        assert urlsplit(trigger["metadata"]["serverAddress"]).port
        assert trigger["metadata"]["threshold"] == "1"
        assert trigger["metadata"]["ignoreNullValues"] == "false", "no figures are not no load"


def options_of(documents: list[dict[str, Any]]) -> dict[str, Any]:
    return parse(arguments(the_container(pods(documents)["pullfill-decode"])))
