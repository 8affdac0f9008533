"""An older build of pullfill, from the history, in a virtual environment of its own."""

from __future__ import annotations

import io
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

from pullfill.wire import WIRE_VERSION
from tests.support.command import PULLFILL

ROOT = Path(__file__).resolve().parents[2]


def first_build() -> str:
    """The commit that recorded what builds of this WIRE_VERSION say. It is the first of them that
    may run beside this one."""
    record = f"tests/unit/core/wire-{WIRE_VERSION}.json"
    asked = ["git", "log", "-1", "--format=%H", "--", record]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def old_build(commit: str, directory: Path) -> list[str]:
    """Return the `pullfill` command of that commit. Skips the test if the history lacks it."""
    tree = directory / "tree"
    # As `git worktree add`, but a test that is killed leaves nothing behind in `.git`.
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True)
    if packed.returncode:
        pytest.skip(f"no commit {commit[:12]} here: the clone is shallow, or there is no git")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(tree, filter="tar")
    venv.create(directory / "venv", symlinks=True)
    site = sysconfig.get_path("purelib", vars={"base": str(directory / "venv")})
    # The other packages are those of this environment. `tree` comes before them.
    shared = [path for path in sys.path if path.endswith("site-packages")]
    Path(site, "old.pth").write_text("\n".join([str(tree), *shared]))
    python = [str(directory / "venv" / "bin" / "python"), "-P"]  # -P: not from this folder
    where = [*python, "-c", "import pullfill; print(pullfill.__file__)"]
    found = subprocess.run(where, capture_output=True, text=True, check=True).stdout
    assert found.startswith(str(tree)), found
    return [*python, *PULLFILL[1:]]
