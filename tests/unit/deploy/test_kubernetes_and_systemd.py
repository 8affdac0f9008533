"""What deploy/ ships for Kubernetes and systemd: it parses, and the real command line takes it.

No Kubernetes and no systemd here: whether a cluster accepts the objects is not tested.
"""

from __future__ import annotations

import asyncio
import configparser
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock
from urllib.parse import urlsplit

import pytest
import typer
import yaml
from prometheus_client import Gauge

from pullfill.config import split_urls
from pullfill.deploy import servers, vllm_flags
from pullfill.deploy.cli import app
from pullfill.deploy.scaling import Settings
from pullfill.registry import settings
from pullfill.runtime import metrics
from pullfill.runtime.lifecycle import EXIT_S
from pullfill.wire import QueueSettings

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
KEDA = DEPLOY / "kubernetes" / "keda" / "scaled-objects.yaml"
FILES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
ROLES = {"decode", "prefill", "frontend"}
ENGINE_FLAGS = {"served-model-name", "enforce-eager", "kv-cache-memory-bytes", "max-model-len"}
"""vLLM's, as far as they are used here: what our own command line does not know goes to vLLM."""


@cache
def documents() -> list[dict[str, Any]]:
    """All objects of all files. Do not change them."""
    return [d for f in FILES for d in yaml.safe_load_all(f.read_text())]


def workloads() -> dict[str, dict[str, Any]]:
    """Name → pod template's spec."""
    kinds = ("Deployment", "StatefulSet")
    return {
        d["metadata"]["name"]: d["spec"]["template"]["spec"]
        for d in documents()
        if d["kind"] in kinds
    }


def the_container(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["containers"]
    return dict(container)


def config_maps() -> dict[str, dict[str, str]]:
    return {d["metadata"]["name"]: d["data"] for d in documents() if d["kind"] == "ConfigMap"}


@cache
def command_line() -> Any:
    return typer.main.get_command(app)


def parse(arguments: list[str]) -> dict[str, Any]:
    """Values of our options, by the real parser. What goes to vLLM must be a flag of vLLM's."""
    role = arguments[0]
    context = command_line().commands[role].make_context(role, arguments[1:])
    for group in vllm_flags.group_flags(context.args):
        name = group[0].split("=")[0].removeprefix("--")
        known = ENGINE_FLAGS | (vllm_flags.FRONTEND_ONLY if role == "frontend" else set())
        assert name in known, f"{role} does not know --{name}"
    return dict(context.params)


def expand(text: str, values: dict[str, str], pattern: str) -> str:
    return re.sub(pattern, lambda found: values[found[1]], text)


def test_all_roles_and_both_servers_are_there() -> None:
    assert set(workloads()) == {f"pullfill-{r}" for r in ROLES | {"nats", "etcd"}}
    assert {u.name for u in UNITS} == {f"pullfill-{r}@.service" for r in ROLES}
    assert all("namespace" not in d["metadata"] for d in documents())


# ------------------------------------------------------------------ Kubernetes


@pytest.mark.parametrize("role", sorted(ROLES))
def test_a_pods_command_line(role: str) -> None:
    pod = workloads()[f"pullfill-{role}"]
    container = the_container(pod)
    values = dict(config_maps()["pullfill"])
    assert container["envFrom"] == [{"configMapRef": {"name": "pullfill"}}]
    env = {e["name"]: e["valueFrom"] for e in container["env"]}
    assert env["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert role == "frontend" or env["OMP_NUM_THREADS"]["resourceFieldRef"]
    values["POD_IP"] = "10.0.0.7"
    options = parse([expand(a, values, r"\$\((\w+)\)") for a in container["args"]])
    assert container["args"][0] == role
    if role == "frontend":
        assert options["advertise"] == f"http://10.0.0.7:{options['port']}"
    else:
        assert options["host"] == "10.0.0.7"
    assert hosts(options["etcd"], 2379) == pods("pullfill-etcd")
    assert hosts(options["nats"], 4222) == pods("pullfill-nats")
    assert (options["namespace"], options["model"]) == (values["NAMESPACE"], values["MODEL"])
    assert pod["terminationGracePeriodSeconds"] >= options["drain_timeout"] + EXIT_S

    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    if role == "frontend":
        assert ports == {"http": options["port"]}
    else:
        assert ports == {n: options[f"{n}_port"] for n in ports}
        assert {"http", "kv"} <= set(ports)
        assert set(ports) == {
            n for n in ("http", "kv", "control", "data") if f"{n}_port" in options
        }
        (shm,) = [m for m in container["volumeMounts"] if m["mountPath"] == "/dev/shm"]
        (volume,) = [v for v in pod["volumes"] if v["name"] == shm["name"]]
        assert volume["emptyDir"]["medium"] == "Memory"
        (kv,) = [a for a in container["args"] if a.startswith("--kv-cache-memory-bytes=")]
        assert bytes_of(volume["emptyDir"]["sizeLimit"]) > int(kv.split("=")[1])
        limit = bytes_of(container["resources"]["limits"]["memory"])
        assert limit > bytes_of(volume["emptyDir"]["sizeLimit"])


def hosts(urls: str, port: int) -> set[str]:
    """Host names of `urls`, each of which names this port."""
    found = [urlsplit(url) for url in split_urls(urls)]
    assert {one.port for one in found} == {port}
    return {str(one.hostname) for one in found}


def pods(name: str) -> set[str]:
    """Names under which the pods of a StatefulSet are known."""
    (found,) = [
        d for d in documents() if d["kind"] == "StatefulSet" and d["metadata"]["name"] == name
    ]
    service = found["spec"]["serviceName"]
    assert any(
        d["kind"] == "Service" and d["metadata"]["name"] == service
        and d["spec"]["clusterIP"] == "None" and d["spec"]["publishNotReadyAddresses"]
        for d in documents()
    )  # fmt: skip
    return {f"{name}-{i}.{service}" for i in range(found["spec"]["replicas"])}


def bytes_of(quantity: str) -> int:
    return int(quantity.removesuffix("Gi")) << 30


@pytest.mark.parametrize("name", sorted(f"pullfill-{r}" for r in ROLES | {"nats", "etcd"}))
def test_ports_probes_volumes_and_rights(name: str) -> None:
    pod = workloads()[name]
    container = the_container(pod)
    named = {p["name"] for p in container["ports"]}
    probes = [p["httpGet"] for k, p in container.items() if k.endswith("Probe")]
    assert probes
    assert {p["port"] for p in probes} <= named
    if name.removeprefix("pullfill-") in ROLES:
        assert container["livenessProbe"]["httpGet"]["path"] == "/live"
        assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    volumes = {v["name"] for v in pod.get("volumes", [])} | {
        claim["metadata"]["name"]
        for d in documents()
        if d["metadata"]["name"] == name
        for claim in d.get("spec", {}).get("volumeClaimTemplates", [])
    }
    assert {m["name"] for m in container.get("volumeMounts", [])} == volumes
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_services_lead_to_pods_and_named_ports() -> None:
    services = [d for d in documents() if d["kind"] == "Service"]
    assert {s["metadata"]["name"] for s in services} == {
        "pullfill", "pullfill-nats", "pullfill-etcd",
    }  # fmt: skip
    for service in services:
        (app_name,) = service["spec"]["selector"].values()
        named = {p["name"] for p in the_container(workloads()[app_name])["ports"]}
        assert {p["targetPort"] for p in service["spec"]["ports"]} <= named
    for document in documents():
        if document["kind"] in ("Deployment", "StatefulSet"):
            labels = document["spec"]["template"]["metadata"]["labels"]
            assert document["spec"]["selector"]["matchLabels"] == labels


def test_the_real_nats_server_takes_its_configuration(tmp_path: Path) -> None:
    text = config_maps()["pullfill-nats"]["nats.conf"]
    assert 'store_dir: "/data"' in text
    config = tmp_path / "nats.conf"
    config.write_text(text.replace("/data", str(tmp_path / "data")))
    done = subprocess.run(
        [str(servers.nats_binary()), "-t", "-c", str(config)],
        capture_output=True,
        check=False,
        env={"POD_NAME": "pullfill-nats-1"},
    )
    assert done.returncode == 0, done.stderr
    assert set(re.findall(r"nats-route://([\w.-]+):6222", text)) == pods("pullfill-nats")
    assert "server_name: $POD_NAME" in text
    (env,) = the_container(workloads()["pullfill-nats"])["env"]
    assert env["name"] == "POD_NAME"


def test_the_real_etcd_knows_the_flags() -> None:
    done = subprocess.run(
        [str(servers.etcd_binary()), "--help"], capture_output=True, text=True, check=False
    )
    known = set(re.findall(r"--[a-z-]+", done.stdout + done.stderr))
    container = the_container(workloads()["pullfill-etcd"])
    assert {a.split("=")[0] for a in container["args"]} <= known
    flags = dict(a.removeprefix("--").split("=", 1) for a in container["args"])
    members = dict(one.split("=") for one in flags["initial-cluster"].split(","))
    assert hosts(",".join(members.values()), 2380) == pods("pullfill-etcd")
    for name, url in members.items():
        assert flags["name"] == "$(POD_NAME)"
        assert flags["initial-advertise-peer-urls"].replace("$(POD_NAME)", name) == url
        assert urlsplit(url).hostname == f"{name}.pullfill-etcd"


def test_the_servers_are_three_and_the_streams_have_as_many_replicas() -> None:
    replicas = {d["metadata"]["name"]: d["spec"] for d in documents() if d["kind"] == "StatefulSet"}
    assert {name: spec["replicas"] for name, spec in replicas.items()} == {
        "pullfill-nats": 3, "pullfill-etcd": 3,
    }  # fmt: skip
    for spec in replicas.values():
        assert spec["podManagementPolicy"] == "Parallel", "one alone never becomes ready"
        assert spec["volumeClaimTemplates"]
    (job,) = [d for d in documents() if d["kind"] == "Job"]
    container = the_container(job["spec"]["template"]["spec"])
    values = config_maps()["pullfill"]
    arguments = [expand(a, values, r"\$\((\w+)\)") for a in container["args"]]
    assert arguments[:2] == ["config", "set"]
    command = command_line().commands["config"].commands["set"]
    told = command.make_context("set", arguments[2:]).params
    assert settings.find(told["key"]) == (QueueSettings, "replicas")
    etcd: Any = AsyncMock()
    etcd.get.return_value = None
    stored = settings.Settings(etcd, "n", QueueSettings).set("replicas", told["value"])
    assert asyncio.run(stored).replicas == 3
    assert (told["etcd"], told["namespace"]) == (values["ETCD"], values["NAMESPACE"])


# ------------------------------------------------------------------ KEDA


def test_keda_scales_deployments_that_exist() -> None:
    """`kubectl apply -f deploy/kubernetes/` leaves its folder out: not every cluster has KEDA."""
    scaled = list(yaml.safe_load_all(KEDA.read_text()))
    assert {one["spec"]["scaleTargetRef"]["name"] for one in scaled} == {
        "pullfill-prefill", "pullfill-decode",
    }  # fmt: skip
    deployments = {d["metadata"]["name"] for d in documents() if d["kind"] == "Deployment"}
    for one in scaled:
        assert (one["apiVersion"], one["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
        spec, name = one["spec"], one["spec"]["scaleTargetRef"]["name"]
        assert name == one["metadata"]["name"]
        assert name in deployments
        least = Settings().min_prefill if name == "pullfill-prefill" else Settings().min_decode
        assert spec["minReplicaCount"] == least < spec["maxReplicaCount"]
        for trigger in spec["triggers"]:
            assert trigger["type"] == "prometheus"
            assert trigger["metricType"] in ("AverageValue", "Value")
            assert urlsplit(trigger["metadata"]["serverAddress"]).port
            assert float(trigger["metadata"].get("activationThreshold", 0)) >= 0
            assert least or "activationThreshold" in trigger["metadata"]


def test_keda_has_the_planners_thresholds() -> None:
    thresholds = {
        trigger["metadata"]["query"]: float(trigger["metadata"]["threshold"])
        for one in yaml.safe_load_all(KEDA.read_text())
        for trigger in one["spec"]["triggers"]
    }
    settings = Settings()
    assert thresholds == {
        sum_of(metrics.PREFILL_DEMAND): settings.prefill_use,
        sum_of(metrics.BACKLOG_SECONDS): settings.backlog_s,
        sum_of(metrics.DECODE_PRESSURE): settings.decode_use,
    }


def sum_of(gauge: Gauge) -> str:
    """Each decode worker once, however many frontends are scraped."""
    (family,) = gauge.describe()
    return f'sum(max by (instance_id) ({family.name}{{role="decode"}}))'


# ------------------------------------------------------------------ systemd


@pytest.mark.parametrize("unit", UNITS, ids=lambda u: u.stem)
def test_a_units_command_line(unit: Path) -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(re.sub(r"\\\n\s*", "", unit.read_text()))
    service = parser["Service"]
    role = unit.stem.removeprefix("pullfill-").rstrip("@")
    comments = unit.read_text()
    example = re.search(r"ARGS=(.*)$", comments, re.M)
    assert example is not None
    values = {
        "ETCD": "http://10.0.0.1:2379", "NATS": "nats://10.0.0.1:4222", "NAMESPACE": "default",
        "MODEL": "/models/m", "SERVED_NAME": "m", "HOST": "10.0.0.7", "ARGS": example[1],
    }  # fmt: skip
    assert all(name in comments.split("[Unit]")[0] for name in values)
    words = shlex.split(expand(service["ExecStart"], values, r"\$\{?(\w+)\}?"))
    assert words[0].endswith("/pullfill")
    assert words[1] == role
    options = parse(words[1:])
    assert options["host"] == "10.0.0.7"
    assert float(service["TimeoutStopSec"]) >= options["drain_timeout"] + EXIT_S
    assert service["RestartPreventExitStatus"] == "2"
