"""Which transports work here: every one is tried, none that is missing stops a worker."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pullfill.config import TRANSPORTS
from pullfill.errors import ConfigError
from pullfill.transfer import catalogue
from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.cuda_ipc import writers
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.tcp.plane import TcpKind

ON_CPU = LocalMemory(0, 64, dense_layout(1, 1, 1, 64))


def test_a_worker_on_a_cpu_gets_what_works_without_a_device() -> None:
    found = catalogue.planes(None, ON_CPU)
    assert "tcp" in found
    assert "nccl" not in found
    for kind in found.values():
        kind.close()
    names = [transport.name for transport in catalogue.peers(None, ON_CPU, None)]
    assert names[0] == "shm"
    assert "cuda_ipc" not in names


class _Nixl(TcpKind):
    name = "nixl"


@pytest.mark.parametrize("why", [None, "no RDMA device"])
def test_nixl_is_a_peers_choice_only_with_rdma_or_by_name(
    monkeypatch: pytest.MonkeyPatch, why: str | None
) -> None:
    monkeypatch.setitem(catalogue._PLANES, "nixl", (__name__, "_Nixl"))
    monkeypatch.setattr(catalogue, "_without_rdma", lambda: why)
    names = [transport.name for transport in catalogue.peers(None, ON_CPU, None)]
    assert ("nixl" in names) == (why is None)
    assert catalogue.absent(None, ON_CPU).get("nixl") == why
    asked = catalogue.peers(["nixl"], ON_CPU, None)
    assert [transport.name for transport in asked] == ["nixl"]
    assert "nixl" in catalogue.planes(None, ON_CPU), "offered to peers that ask for it"


@pytest.mark.parametrize("name", ["nccl", "cuda_ipc"])
def test_what_was_asked_for_by_name_and_does_not_work_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--transports {name}"):
        catalogue.peers([name], ON_CPU, None)


def test_every_transport_says_whether_it_works() -> None:
    answers = catalogue.survey(None)
    assert set(answers) == set(TRANSPORTS)
    assert answers["shm"] is None
    assert answers["tcp"] is None
    assert answers["nccl"]
    assert "GPU" in (answers["cuda_ipc"] or "")


def test_gpu_memory_is_mapped_only_where_deaths_can_be_proved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert catalogue.survey(0)["cuda_ipc"] is None
    assert catalogue.survey(0)["shm"]
    monkeypatch.setattr(writers, "why_no_proof", lambda: "the driver frees later")
    assert catalogue.survey(0)["cuda_ipc"] == "the driver frees later"


def test_the_survey_of_this_machine_is_json() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pullfill.transfer.catalogue"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(json.loads(done.stdout)) == set(TRANSPORTS)
