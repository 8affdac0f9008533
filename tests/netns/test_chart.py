"""The pods of the Helm chart, each on a host of its own with the names of the chart's Services.

Kubernetes does not run here. The test starts what Kubernetes would start: the command and arguments
of each container. Each pod has its own network, address and /dev/shm. Paths of volumes lie in the
test's directory.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from pullfill.deploy import local_servers
from tests.support.chart import of_kind, render, the_container
from tests.support.cluster import FLAGS, until
from tests.support.flags import expand
from tests.support.hosts import Hosts, why_not
from tests.support.prompts import random_prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(280)]
NAME = "chart-model"
READY_S = 120.0
SHORT = {"frontend": "front"}
"""Names of network namespaces are short."""
OWN_SHM = 'mount -t tmpfs -o size=512m pod /dev/shm && exec "$0" "$@"'
BINARIES = {"etcd": local_servers.etcd_binary, "nats-server": local_servers.nats_binary}
NETNS = Path("/etc/netns")
OF_KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}


class Pods:
    """Starts pods of the chart. Owns their processes and hosts."""

    def __init__(self, directory: Path, values: dict[str, Any]) -> None:
        self._directory = directory
        self._documents = render(**values)
        sets = of_kind(self._documents, "StatefulSet")
        self._templates = {
            f"{name}-{i}": one["spec"]["template"]
            for name, one in sets.items() for i in range(one["spec"]["replicas"])
        }  # fmt: skip
        for name, one in of_kind(self._documents, "Deployment", "Job").items():
            self._templates[name] = one["spec"]["template"]
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._outside = {k: v for k, v in os.environ.items() if k != "PULLFILL_STATE_DIR"}
        self.hosts = Hosts([self._short(name) for name in self._templates])
        self._name_services(sets)

    @staticmethod
    def _short(pod: str) -> str:
        name = pod.removeprefix("pullfill-")
        return SHORT.get(name, name)

    def _name_services(self, sets: dict[str, Any]) -> None:
        """What the DNS of Kubernetes says of the pods of headless Services."""
        lines = ["127.0.0.1 localhost"]
        for name, one in sets.items():
            for pod in (f"{name}-{i}" for i in range(one["spec"]["replicas"])):
                lines.append(f"{self.address(pod)} {pod}.{one['spec']['serviceName']}")
        for pod in self._templates:
            where = NETNS / Path(self.hosts.namespace(self._short(pod))).name
            where.mkdir(parents=True)
            (where / "hosts").write_text("\n".join(lines) + "\n")

    def address(self, pod: str) -> str:
        return self.hosts.address(self._short(pod))

    def start(self, pod: str) -> None:
        container = the_container(self._templates[pod])
        fields = {"status.podIP": self.address(pod), "metadata.name": pod}
        environment = {
            one["name"]: fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in container.get("env", [])
            if "fieldRef" in one["valueFrom"]
        }
        home = self._directory / pod
        home.mkdir(exist_ok=True)
        for name, text in of_kind(self._documents, "ConfigMap").items():
            if pod.startswith(name):
                (home / "nats.conf").write_text(self._moved(text["data"]["nats.conf"], home))
        arguments = [
            self._moved(expand(word, environment, r"\$\((\w+)\)"), home)
            for word in container["args"]
        ]
        program = container.get("command", ["pullfill"])[0]
        known = BINARIES.get(program)
        command = [str(known())] if known else [sys.executable, "-m", program]
        inside = [*self.hosts.command(self._short(pod)), "sh", "-c", OWN_SHM]
        with (home / "log").open("ab") as log:
            self.running[pod] = subprocess.Popen(
                [*inside, *command, *arguments],
                env={**self._outside, **environment, **OF_KUBERNETES, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    @staticmethod
    def _moved(text: str, home: Path) -> str:
        return text.replace("/etc/nats/", f"{home}/").replace("/data", f"{home}/data")

    def probe(self, pod: str, kind: str) -> bool:
        """Whether one of the pod's probes finds it well."""
        container = the_container(self._templates[pod])
        asked = container[kind]["httpGet"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        url = f"http://{self.address(pod)}:{ports[asked['port']]}{asked['path']}"
        try:
            return httpx.get(url, trust_env=False, timeout=5).is_success
        except httpx.TransportError:
            return False

    def wait_ready(self, *pods: str) -> None:
        for pod in pods:
            until(partial(self.probe, pod, "readinessProbe"), READY_S, f"{pod} is ready")

    def log(self, pod: str) -> str:
        return f"{pod}: {(self._directory / pod / 'log').read_text()[-2000:]}"

    def finish(self, pod: str) -> int:
        return self.running.pop(pod).wait(60)

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
        for pod in self._templates:
            where = NETNS / Path(self.hosts.namespace(self._short(pod))).name
            (where / "hosts").unlink(missing_ok=True)
            where.rmdir()
        self.hosts.close()


@pytest.fixture
def pods(tmp_path: Path, model_path: Path) -> Iterator[Pods]:
    if reason := why_not():
        pytest.skip(reason)
    flags = [flag for flag in FLAGS if not flag.startswith("--served-model-name")]
    worker = {"args": [*flags, "--kv-cache-memory-bytes=33554432"]}
    values = {"model": str(model_path), "servedModelName": NAME, "decode": worker,
              "prefill": worker, "frontend": {"args": flags, "replicas": 1}}  # fmt: skip
    with closing(Pods(tmp_path, values)) as made:
        yield made


def ask(pods: Pods, seed: int) -> str:
    """A prompt that is long enough for a prefill worker. Returns where it was prefilled."""
    url = f"http://{pods.address('pullfill-frontend')}:8000"
    body = {"model": NAME, "prompt": random_prompt(700, seed=seed), "max_tokens": 4}
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        told = client.get(f"/pullfill/requests/{answer.json()['id']}").json()
    return str(told["path"])


@pytest.mark.essential
def test_the_pods_find_each_other_serve_and_drain(pods: Pods) -> None:
    """Three servers of each kind form clusters, of which one may be lost."""
    trios = [f"pullfill-{kind}-{i}" for kind in ("etcd", "nats") for i in range(3)]
    for pod in trios:
        pods.start(pod)
    pods.wait_ready(*trios)
    ours = ["pullfill-decode", "pullfill-prefill", "pullfill-frontend"]
    for pod in ours:
        pods.start(pod)
    pods.start("pullfill-settings")
    assert pods.finish("pullfill-settings") == 0, pods.log("pullfill-settings")
    assert "queue.replicas = 3" in pods.log("pullfill-settings")
    pods.wait_ready(*ours)
    for pod in ours:
        assert pods.probe(pod, "livenessProbe")
        assert pods.probe(pod, "startupProbe")
    status = f"http://{pods.address('pullfill-decode')}:9100/status"
    told = httpx.get(status, trust_env=False).json()
    assert told["pod"] == "pullfill-decode", "pullfill drain names it"
    seeds = iter(range(50_000, 60_000))
    until(lambda: ask(pods, next(seeds)) == "remote", READY_S, "a remote prefill")
    for pod in ("pullfill-etcd-1", "pullfill-nats-1"):
        pods.running[pod].kill()
    until(lambda: ask(pods, next(seeds)) == "remote", READY_S, "one without these two servers")
    for pod in ours:
        pods.running[pod].send_signal(signal.SIGTERM)
    assert {pod: pods.finish(pod) for pod in ours} == dict.fromkeys(ours, 0)
