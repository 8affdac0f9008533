"""The Helm chart and the systemd units: our real command line takes what they run.

No Kubernetes and no systemd here. Helm itself renders the chart.
"""

from __future__ import annotations

import configparser
import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import kubernetes_validate.utils
import pytest
import yaml

from pullfill.needs import PlanSettings
from pullfill.options import LogFormat
from pullfill.runtime.lifecycle import EXIT_S
from tests.support.chart import CHART, RELEASE, HelmRefused, of_kind, pods, render, the_container
from tests.support.flags import expand, parse

WORKERS = {"decode", "prefill", "worker"}
ROLES = WORKERS | {"frontend"}
OURS = {f"pullfill-{r}" for r in ROLES}
SERVERS = {"pullfill-nats", "pullfill-etcd"}
SECRET = {"securitySecret": "keys"}


def arguments(container: dict[str, Any]) -> list[str]:
    return [expand(a, {"POD_IP": "10.0.0.7"}, r"\$\((\w+)\)") for a in container["args"]]


@pytest.mark.parametrize("drain", [60, 600])
@pytest.mark.essential
def test_kubernetes_waits_longer_than_a_drain(drain: int) -> None:
    """SIGTERM drains. A frontend first waits until the Service sends it no more connections."""
    values: dict[str, Any] = {"drainTimeoutSeconds": drain}
    templates = pods(render(**values, frontend=values))
    for role in ROLES:
        template = templates[f"pullfill-{role}"]
        options = parse(arguments(the_container(template)))
        assert options["drain_timeout_s"] == drain
        assert "lifecycle" not in the_container(template)
        ready = options["ready_grace_s"] if role == "frontend" else 0.0
        assert template["spec"]["terminationGracePeriodSeconds"] >= ready + drain + EXIT_S


def test_the_values_for_gpus() -> None:
    documents = render(**GPU)
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
    """tests/netns/test_chart.py asks the probes of running pods."""
    for name, template in pods(render(**SECRET)).items():
        container = the_container(template)
        if name == "pullfill-nats":
            # A server that waits for the others must not be restarted for it.
            alive, ready = (
                container[f"{k}Probe"]["httpGet"]["path"] for k in ("liveness", "readiness")
            )
            assert (alive, ready) == (
                "/healthz?js-enabled-only=true", "/healthz?js-server-only=true",
            )  # fmt: skip
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize("role", sorted(WORKERS))
def test_a_pod_names_the_ports_of_its_sides(role: str) -> None:
    container = the_container(pods(render())[f"pullfill-{role}"])
    told = parse(arguments(container))
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert named == {name: told[f"{name}_port"] for name in named}


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
        ("pullfill-worker", "control"): [workers], ("pullfill-worker", "kv"): [workers],
        ("pullfill-worker", "data"): [front], ("pullfill-worker", "http"): [front],
        ("pullfill-nats", "client"): [OURS], ("pullfill-nats", "cluster"): [{"pullfill-nats"}],
        ("pullfill-etcd", "client"): [OURS], ("pullfill-etcd", "peer"): [{"pullfill-etcd"}],
    }  # fmt: skip


def test_the_servers_are_three() -> None:
    for one in of_kind(render(), "StatefulSet").values():
        assert one["spec"]["replicas"] == 3
        assert one["spec"]["podManagementPolicy"] == "Parallel", "one alone never becomes ready"
        assert one["spec"]["volumeClaimTemplates"]


# ------------------------------------------------------------------ KEDA


@pytest.mark.parametrize(
    ("replicas", "roles"),
    [
        ({}, {"decode", "prefill"}),
        ({"decode": {"replicas": 0}}, {"prefill"}),  # stock servers decode
        ({"worker": {"replicas": 2}}, {"worker"}),
    ],
    ids=["split", "stock", "both"],
)
def test_keda_scales_deployments_that_exist(replicas: dict[str, Any], roles: set[str]) -> None:
    assert not of_kind(render(**replicas), "ScaledObject")
    documents = render(**replicas, keda={"enabled": True})
    scaled = of_kind(documents, "ScaledObject")
    assert set(scaled) == {f"pullfill-{role}" for role in roles}
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
            "failureThreshold": 3,
            "replicas": 2 if name == "pullfill-worker" else 1,
            "behavior": "currentReplicas",
        }  # fmt: skip
        (trigger,) = spec["triggers"]
        assert (trigger["type"], trigger["metricType"]) == ("prometheus", "AverageValue")
        assert urlsplit(trigger["metadata"]["serverAddress"]).port
        assert trigger["metadata"]["threshold"] == "1"
        assert trigger["metadata"]["ignoreNullValues"] == "false", "no figures are not no load"


# ------------------------------------------------------------------ systemd


UNITS = sorted((Path(__file__).resolve().parents[3] / "deploy" / "systemd").glob("*.service"))


def test_a_worker_has_both_sides_unless_its_file_says_otherwise() -> None:
    assert [u.stem for u in UNITS] == ["pullfill-frontend@", "pullfill-worker@"]
    lines = UNITS[1].read_text().splitlines()
    # systemd lets the file win. `-`: it may be missing.
    assert "Environment=KIND=worker" in lines
    assert "EnvironmentFile=-/etc/pullfill/worker-%i.env" in lines


@pytest.mark.parametrize("role", sorted(ROLES))
@pytest.mark.essential
def test_a_units_command_line(role: str) -> None:
    unit = UNITS[role in WORKERS]
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(re.sub(r"\\\n\s*", "", unit.read_text()))
    service = parser["Service"]
    comments = unit.read_text()
    example = re.search(r"ARGS=(.*)$", comments, re.M)
    assert example is not None
    values = {
        "ETCD": "http://10.0.0.1:2379", "NATS": "nats://10.0.0.1:4222", "NAMESPACE": "default",
        "MODEL": "/models/m", "SERVED_NAME": "m", "HOST": "10.0.0.7", "ARGS": example[1],
    }  # fmt: skip
    if role in WORKERS:
        values["KIND"] = role
    assert all(name in comments.split("[Unit]")[0] for name in values)
    words = shlex.split(expand(service["ExecStart"], values, r"\$\{?(\w+)\}?"))
    assert words[0].endswith("/pullfill")
    assert words[1] == role
    options = parse(words[1:])
    assert options["host"] == "10.0.0.7"
    assert float(service["TimeoutStopSec"]) >= (
        options["drain_timeout_s"] + options.get("ready_grace_s", 0.0) + EXIT_S
    )
    assert service["RestartPreventExitStatus"] == "2"


# ------------------------------------------------------------------ what Kubernetes accepts


# It reads all definitions of a release, 1 MB of JSON, for each object.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)
RELEASES = ("1.29", "1.35", "1.36", "1.37")
"""The oldest that the chart accepts, and the newest three."""
WITHOUT_SCHEMA = {"ScaledObject", "PodMonitor"}
"""KEDA and the Prometheus Operator bring them."""
EVERYTHING: dict[str, Any] = {
    "global": {"image": "registry:5000/pullfill:1", "imagePullSecrets": [{"name": "s"}]},
    "securitySecret": "keys",
    "otlpTracesEndpoint": "http://collector:4317",
    "nats": {"storageClassName": "fast"},
    "etcd": {"storageClassName": "fast"},
    "decode": {
        "args": ["--max-model-len=4096"],
        "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "t"}}}],
        "cacheClaim": "models",
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "nodeSelector": {"gpu": "yes"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": "25%"}},
        "annotations": {"k8s.v1.cni.cncf.io/networks": "rdma"},
        "runtimeClassName": "nvidia",
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "extraVolumes": [{"name": "infiniband", "hostPath": {"path": "/dev/infiniband"}}],
        "extraVolumeMounts": [{"name": "infiniband", "mountPath": "/dev/infiniband"}],
    },
    "frontend": {"args": ["--max-inflight=64"], "cacheClaim": "models"},
    "networkPolicy": {"clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]},
    "keda": {"enabled": True},
    "podMonitor": {"enabled": True},
    "pullfillNamespace": "blue",
}
ELSEWHERE = {
    "nats": {"enabled": False}, "natsUrl": "nats://n:4222",
    "etcd": {"enabled": False}, "etcdUrl": "https://e:2379",
    "networkPolicy": {"enabled": False},
}  # fmt: skip
STOCK = Path(__file__).parents[3] / "deploy" / "stock"
GPU = yaml.safe_load((CHART / "values-gpu.yaml").read_text())
SERVERS_OF_OTHERS = yaml.safe_load((STOCK / "servers.yaml").read_text())


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    "values",
    [{}, EVERYTHING, ELSEWHERE, GPU, SERVERS_OF_OTHERS],
    ids=["least", "most", "elsewhere", "gpu", "servers of others"],
)
@pytest.mark.essential
def test_a_release_accepts_each_object(release: str, values: dict[str, Any]) -> None:
    for one in render(**values):
        if one["kind"] not in WITHOUT_SCHEMA:
            assert kubernetes_validate.validate(one, release, strict=True) == release


def test_servers_elsewhere() -> None:
    documents = render(**ELSEWHERE)
    assert set(pods(documents)) == OURS
    assert not of_kind(documents, "Job"), "others decide how many replicas their streams have"
    for template in pods(documents).values():
        options = parse(the_container(template)["args"])
        assert (options["nats"], options["etcd"]) == ("nats://n:4222", "https://e:2379")


def test_values_reach_the_pods() -> None:
    template = pods(render(**EVERYTHING))["pullfill-decode"]
    container, given = the_container(template), EVERYTHING["decode"]
    assert container["image"] == "registry:5000/pullfill:1"
    options = parse(container["args"])
    assert str(options["security"]) == "/etc/pullfill/security.toml"
    assert options["log_format"] is LogFormat.JSON
    assert "--otlp-traces-endpoint=http://collector:4317" in container["args"]
    volumes = {v["name"]: v for v in template["spec"]["volumes"]}
    assert volumes["security"]["secret"] == {"secretName": "keys", "defaultMode": 0o440}
    rights = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"add": ["IPC_LOCK"], "drop": ["ALL"]},
    }
    assert container["securityContext"] == rights
    assert given["extraVolumeMounts"][0] in container["volumeMounts"]


def servers_of_other_charts() -> dict[str, tuple[list[str], dict[str, Any]]]:
    """File of deploy/stock → arguments and labels of the pods of vLLM's servers."""
    stack = yaml.safe_load((STOCK / "production-stack.yaml").read_text())
    (model,) = stack["servingEngineSpec"]["modelSpec"]
    overlay = yaml.safe_load((STOCK / "kustomization.yaml").read_text())
    (patch,) = overlay["patches"]
    given: dict[str, list[Any]] = {}
    for one in yaml.safe_load(patch["patch"]):
        assert one["op"] == "add"
        given.setdefault(one["path"], []).append(one["value"])
    container = "/spec/template/spec/containers/0"
    assert [one["name"] for one in given[f"{container}/env/-"]] == ["POD_IP"]
    flag, *rest = given[f"{container}/args/-"]
    (labels,) = given["/spec/template/metadata/labels/pullfill"]
    return {
        "production-stack": (model["vllmConfig"]["extraArgs"], model["podLabels"]),
        "kustomization": ([*flag.split("=", 1), *rest], {"pullfill": labels}),
    }


@pytest.mark.parametrize("file", ["production-stack", "kustomization"])
def test_servers_of_other_charts_find_ours(file: str) -> None:
    documents = render(**SERVERS_OF_OTHERS)
    assert of_kind(documents, "Deployment")["pullfill-decode"]["spec"]["replicas"] == 0
    options = parse(the_container(pods(documents)["pullfill-prefill"])["args"])
    args, labels = servers_of_other_charts()[file]
    flag = json.loads(args[args.index("--kv-transfer-config") + 1])
    assert (flag["kv_connector"], flag["kv_role"]) == ("PullfillDecode", "kv_consumer")
    assert flag["kv_connector_module_path"] == "pullfill.worker.stock_core"
    ours = {key: options[key] for key in ("etcd", "nats", "namespace")} | {"host": "$(POD_IP)"}
    # The release is `demo` there, and `pullfill` here.
    theirs = json.loads(json.dumps(flag["kv_connector_extra_config"]).replace("demo", RELEASE))
    assert theirs == ours
    peer = {"podSelector": {"matchLabels": labels}}
    policies = of_kind(documents, "NetworkPolicy")
    reached = {
        (name, port["port"]) for name, one in policies.items() for rule in one["spec"]["ingress"]
        if peer in rule.get("from", []) for port in rule["ports"]
    }  # fmt: skip
    assert reached == {
        ("pullfill-nats", "client"), ("pullfill-etcd", "client"), ("pullfill-prefill", "kv"),
        *(("pullfill-worker", port) for port in ("control", "kv")),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"modle": "m"}, "modle"),
        ({"prefill": {"args": ["enforce-eager"]}}, "enforce-eager"),
        ({"nats": {"replicas": 2}}, "replicas"),
        ({"drainTimeoutSeconds": "60"}, "drainTimeoutSeconds"),
        ({"nats": {"enabled": False}}, "natsUrl is needed"),
        ({"keda": {"decode": {"min": 0}}}, "minimum"),
        ({"pullfillNamespace": "-blue"}, "pullfillNamespace"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_value_is_refused_by_its_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(HelmRefused, match=named):
        render(**values)
