"""Which transports work here: every one is tried, none that is missing stops a worker."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pullfill.config import TRANSPORTS
from pullfill.errors import ConfigError
from pullfill.transfer import connect
from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.gpu import cuda
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.nixl import agent, nixl_backend
from pullfill.transfer.stream.tcp_backend import TcpKind
from tests.support.fake_gpu import FakeDriver

ON_CPU = LocalMemory(0, 64, dense_layout(1, 1, 1, 64))


def test_a_worker_on_a_cpu_gets_what_works_without_a_device() -> None:
    found = connect.backends(None, ON_CPU)
    assert "tcp" in found
    assert "nccl" not in found
    for kind in found.values():
        kind.close()
    names = [each.name for each in connect.peer_transports(None, [ON_CPU], None)]
    assert names[0] == "shm"
    assert "cuda_ipc" not in names


class _Nixl(TcpKind):
    name = "nixl"


def test_nixl_is_used_and_offered_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_backend, "NixlKind", _Nixl)
    monkeypatch.setenv(agent.ENV, "eth9")
    assert "nixl" not in [
        transport.name for transport in connect.peer_transports(None, [ON_CPU], None)
    ]
    assert "nixl" not in connect.backends(None, ON_CPU)
    assert "--transports nixl" in connect.why_absent(None, ON_CPU)["nixl"]
    asked = connect.peer_transports(["nixl"], [ON_CPU], None)
    assert [transport.name for transport in asked] == ["nixl"]
    assert list(connect.backends(["nixl"], ON_CPU)) == ["nixl"]
    assert os.environ[agent.ENV] == "eth9", "who runs it has the last word"


def test_nixl_listens_where_the_worker_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nixl_backend, "NixlKind", _Nixl)
    monkeypatch.setenv(agent.ENV, "")
    connect.backends(["nixl"], ON_CPU, "127.0.0.1")
    assert os.environ[agent.ENV] == "lo"
    monkeypatch.setenv(agent.ENV, "")
    connect.backends(["nixl"], ON_CPU, "0.0.0.0")
    assert not os.environ[agent.ENV]
    assert "every network device" in caplog.text


def test_the_devices_of_an_address_and_every_rdma_card(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = psutil.net_if_addrs()["lo"][0]
    assert (real.family, real.address) == (socket.AF_INET, "127.0.0.1")
    found = {
        "lo": [(socket.AF_INET, "127.0.0.1")],
        "eth0": [(17, "02:fc:00:00:00:01"), (socket.AF_INET, "10.9.9.9")],
        "eth0:1": [(socket.AF_INET, "10.9.9.7")],
        "eth1": [(socket.AF_INET6, "fe80::1%eth1")],
    }
    addresses = {
        device: [real._replace(family=family, address=address) for family, address in entries]
        for device, entries in found.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    (tmp_path / "mlx5_0" / "ports" / "1").mkdir(parents=True)
    assert agent.devices_for("10.9.9.9", tmp_path) == "eth0,mlx5_0:1"
    assert agent.devices_for("10.9.9.7", tmp_path) == "eth0,mlx5_0:1"
    assert agent.devices_for("[fe80::1]", tmp_path) == "eth1,mlx5_0:1"
    assert agent.devices_for("10.9.9.8", tmp_path) is None
    assert agent.devices_for("a-name", tmp_path) is None


def test_what_was_not_chosen_is_not_even_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def missing(module: str) -> None:
        asked.append(module.split(".")[-1])
        raise ImportError(module)

    monkeypatch.setattr(importlib, "import_module", missing)
    absent = connect.why_absent(["shm"], ON_CPU)
    assert set(absent) == set(TRANSPORTS) - {"shm"}
    assert asked == []
    assert "not installed" in connect.why_absent(None, ON_CPU)["tcp"]
    assert asked == ["nccl_backend", "tcp_backend"]


@pytest.mark.parametrize("name", ["nccl", "cuda_ipc"])
def test_what_was_asked_for_by_name_and_does_not_work_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--transports {name}"):
        connect.peer_transports([name], [ON_CPU], None)


def test_every_transport_says_whether_it_works() -> None:
    answers = connect.survey(None)
    assert set(answers) == set(TRANSPORTS)
    assert answers["shm"] is None
    assert answers["tcp"] is None
    assert answers["nccl"]
    assert "GPU" in (answers["cuda_ipc"] or "")


def test_gpu_memory_is_mapped_only_where_deaths_can_be_proved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(cuda, "load", lambda: driver)
    assert connect.survey(0)["cuda_ipc"] is None
    assert connect.survey(0)["shm"]
    driver.mps = True
    assert "MPS runs here" in (connect.survey(0)["cuda_ipc"] or "")
    monkeypatch.undo()
    cuda.load.cache_clear()
    if cuda.why_no_cuda() is not None:
        assert "no CUDA driver" in (connect.survey(0)["cuda_ipc"] or "")


def test_the_survey_of_this_machine_is_json() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pullfill.transfer.connect"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(json.loads(done.stdout)) == set(TRANSPORTS)
