"""What pip makes of the layout: a wheel holds every room as real files and works elsewhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("queue", "transfer", "decode_worker", "prefill_worker", "frontend", "deploy")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: building leaves folders beside the source."""
    base = tmp_path_factory.mktemp("wheel")
    source = base / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("pullfill", *ROOMS):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*command, "-w", str(base), str(source)], check=True, timeout=300)
    return next(base.glob("pullfill-*.whl"))


def test_the_wheel_holds_every_file_of_every_room(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {info.filename: info for info in archive.infolist()}
    expected = {f"pullfill/{p.relative_to(ROOT / 'pullfill')}"
                for p in (ROOT / "pullfill").rglob("*.py")}  # fmt: skip
    for room in ROOMS:
        expected |= {f"pullfill/{p.relative_to(ROOT)}" for p in (ROOT / room).rglob("*.py")}
    assert expected <= set(inside)
    assert all(inside[name].file_size or name.endswith("__init__.py") for name in expected)
    assert "pullfill/queue/__init__.py" not in inside
    page = {f"pullfill/{p.relative_to(ROOT)}" for p in (ROOT / "frontend" / "ui").iterdir()}
    assert len(page) > 5
    assert page <= set(inside)
    assert "pullfill/py.typed" in inside
    assert not any(name.startswith(("tests/", "queue/", "deploy/")) for name in inside)


def test_an_unpacked_wheel_imports_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    names = ", ".join(f"pullfill.{room}" for room in ROOMS)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        f"import {names}, pullfill.queue.contract, pullfill.deploy.cli, queue\n"
        f"assert pullfill.__file__.startswith({str(site)!r}), pullfill.__file__\n"
        "assert hasattr(queue, 'SimpleQueue')\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, check=True, timeout=60)
