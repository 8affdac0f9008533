"""What pip makes of the layout: sdist and wheel hold every room, and work elsewhere.

The wheel is built from the sdist, so what it holds the sdist holds, too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import httpx
import pytest

from pullfill.config import read_cluster_file
from pullfill.engine import check

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("queue", "transfer", "decode_worker", "prefill_worker", "frontend", "deploy")
OURS = "\n".join(path for path in sys.path if path.endswith("site-packages"))
HOOKS = (
    "import sys, setuptools.build_meta as hooks; "
    "print(getattr(hooks, 'build_' + sys.argv[1])(sys.argv[2]))"
)
"""What `pip wheel` and `python -m build` call, without a download of setuptools."""


def build(kind: str, source: Path, into: Path) -> Path:
    command = [sys.executable, "-c", HOOKS, kind, str(into)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return into / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: building leaves folders beside the source."""
    base = tmp_path_factory.mktemp("sdist")
    source = base / "source"
    for name in files_of_git("."):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    (source / "pullfill" / "__pycache__").mkdir()
    (source / "pullfill" / "__pycache__" / "old.pyc").touch()
    return build("sdist", source, base)


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(base, filter="data")
    return build("wheel", base / sdist.name.removesuffix(".tar.gz"), base)


def bare_venv(path: Path) -> Path:
    """Make an environment without pip. It finds the packages of this one, but not pullfill.

    Return the folder of its own packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True, timeout=60)
    (site,) = path.glob("lib/python*/site-packages")
    (site / "ours.pth").write_text(OURS)
    return site


@pytest.fixture(scope="module")
def venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in a new environment. What it requires is found in ours, the repository is not."""
    path = tmp_path_factory.mktemp("pip") / "venv"
    bare_venv(path)
    pip = [sys.executable, "-m", "pip", "--python", path / "bin" / "python"]
    subprocess.run([*pip, "install", "-q", "--no-deps", wheel], check=True, timeout=120)
    return path


def environment(venv: Path) -> dict[str, str]:
    """Without what leads to the repository. nats-server is on PATH."""
    path = os.pathsep.join((f"{venv}/bin", sysconfig.get_path("scripts"), os.environ["PATH"]))
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PATH": path}


def run(venv: Path, *command: str, cwd: Path, timeout: float = 60.0) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=environment(venv), capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files_of_git(folder: str) -> list[str]:
    """What git has of a folder, and what it would take."""
    command = ["git", "ls-files", "-co", "--exclude-standard", folder]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in listed.stdout.splitlines() if os.path.lexists(ROOT / name)]


def test_the_wheel_holds_every_file_of_every_room(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {info.filename: info.file_size for info in archive.infolist()}
    expected = {
        name if folder == "pullfill" else f"pullfill/{name}": (ROOT / name).stat().st_size
        for folder in ("pullfill", *ROOMS)
        for name in files_of_git(folder)
        if not (ROOT / name).is_symlink()
    }
    assert len(expected) > 200
    assert {k: v for k, v in inside.items() if ".dist-info/" not in k} == expected
    assert "pullfill/queue/__init__.py" not in inside
    assert "pullfill/frontend/ui/index.html" in inside


@pytest.mark.essential
def test_the_installed_wheel_imports_without_the_repository(venv: Path, tmp_path: Path) -> None:
    names = ", ".join(f"pullfill.{room}" for room in ROOMS)
    code = (
        f"import {names}, pullfill.queue.contract, pullfill.deploy.cli, queue\n"
        f"assert pullfill.__file__.startswith({str(venv)!r}), pullfill.__file__\n"
        "assert hasattr(queue, 'SimpleQueue')\n"
    )
    run(venv, "python", "-P", "-c", code, cwd=tmp_path)


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_cluster_of_the_installed_wheel_serves(venv: Path, tmp_path: Path) -> None:
    """`pullfill up` with the demo model, a prompt that is prefilled remotely, `pullfill down`."""
    run(venv, "pullfill", "up", "--detach", "--port", "0", cwd=tmp_path, timeout=240)
    try:
        url = read_cluster_file(tmp_path / ".pullfill").frontend_url
        body = {"model": "demo", "prompt": "word " * 600, "max_tokens": 4}
        with httpx.Client(trust_env=False, timeout=120) as client:
            answer = client.post(f"{url}/v1/completions", json=body).raise_for_status().json()
        assert answer["usage"]["completion_tokens"] == 4
        told = run(venv, "pullfill", "explain", answer["id"], "--json", cwd=tmp_path)
        assert json.loads(told)["path"] == "remote"
    finally:
        run(venv, "python", "-m", "pullfill", "down", cwd=tmp_path, timeout=120)


STOCK = ROOT / "deploy" / "stock"


def test_a_layer_on_an_image_of_vllm_changes_nothing_there(wheel: Path, tmp_path: Path) -> None:
    """The commands of deploy/stock/Dockerfile, in an environment in place of an image.

    pip and uv see there what describes our packages, without pullfill. None of them may change."""
    image = tmp_path / "venv"
    site = bare_venv(image)
    for folder in OURS.splitlines():
        for described in Path(folder).glob("*.dist-info"):
            if not described.name.startswith("pullfill-"):
                shutil.copytree(described, site / described.name)
                (site / described.name / "RECORD").write_text("")
    stages = (STOCK / "Dockerfile").read_text().replace("\\\n", "").split("\nFROM ")
    (command,) = re.findall(r"^RUN (?:--mount=\S+ +)?(.*)$", stages[-1], re.M)
    offline = tmp_path / "wheel"
    offline.mkdir()
    shutil.copy2(wheel, offline)
    (offline / "uv").symlink_to(Path(sys.executable).parent / "uv")
    (vllm,) = check.installed_builds()
    python = image / "bin" / "python"
    env = environment(image) | {
        "PYTHON": str(python), "UV_NO_INDEX": "1", "UV_FIND_LINKS": str(offline)
    }  # fmt: skip

    def there() -> set[str]:
        listed = [offline / "uv", "pip", "freeze", "--python", python]
        done = subprocess.run(listed, check=True, capture_output=True, text=True)
        return set(done.stdout.splitlines())

    before = there()
    assert {f"{vllm}=={metadata.version(vllm)}", f"torch=={metadata.version('torch')}"} <= before
    shell = ["sh", "-ec", command.replace("/wheel/", f"{offline}/")]
    done = subprocess.run(shell, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"vLLM {metadata.version(vllm)}"
    after = there()
    assert before < after
    assert [line.partition(" @")[0] for line in after - before] == ["pullfill"]
