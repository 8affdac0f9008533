"""Releases of Kubernetes accept the objects of the chart; wrong values are refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import kubernetes_validate
import kubernetes_validate.utils
import pytest
import yaml

from pullfill.options import LogFormat
from tests.support.chart import CHART, HelmRefused, of_kind, pods, render, the_container
from tests.support.flags import parse

# It reads all definitions of a release, 1 MB of JSON, for each object.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)
RELEASES = ("1.29", "1.35", "1.36", "1.37")
"""The oldest that the chart accepts, and the newest three."""
WITHOUT_SCHEMA = {"ScaledObject", "PodMonitor"}
"""KEDA and the Prometheus Operator bring them. test_manifests.py looks at their fields."""
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

GPU = yaml.safe_load((CHART / "values-gpu.yaml").read_text())


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    "values", [{}, EVERYTHING, ELSEWHERE, GPU], ids=["least", "most", "elsewhere", "gpu"]
)
@pytest.mark.essential
def test_a_release_accepts_each_object(release: str, values: dict[str, Any]) -> None:
    for one in render(**values):
        if one["kind"] not in WITHOUT_SCHEMA:
            assert kubernetes_validate.validate(one, release, strict=True) == release


def test_servers_elsewhere() -> None:
    documents = render(**ELSEWHERE)
    assert set(pods(documents)) == {"pullfill-decode", "pullfill-prefill", "pullfill-frontend"}
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
