"""Processes of two builds in one cluster, as during every rolling upgrade."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

from pullfill.wire import WIRE_VERSION
from tests.support.checked import checked
from tests.support.cluster import PULLFILL, Cluster, until
from tests.support.load import Load
from tests.support.oracle import Oracle

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


SLOW_S = 20.0
"""A job that its reader cannot use would wait for the claim timeout, here 30 s."""


def pairs(load: Load) -> set[tuple[str, str]]:
    """Which decode worker had which prefill worker compute for it."""
    return {(t["decode_instance"], t["prefill_instance"]) for t in load.told()}


@pytest.mark.long
@pytest.mark.essential
def test_row_22_two_builds_work_together_in_every_pair(
    paired: Cluster, oracle: Oracle, tmp_path: Path
) -> None:
    program = old_build(first_build(), tmp_path)
    new_url = paired.frontend_url
    olds = [paired.launch(role, program=program) for role in ("decode", "prefill", "frontend")]
    old_url, paired.frontend_url = paired.frontend_url, new_url
    everybody = [w for role in ("decode", "prefill", "frontend") for w in paired.of(role)]
    paired.wait_ready(*everybody)
    decodes, prefills = ({w.instance_id for w in paired.of(r)} for r in ("decode", "prefill"))
    every = set(itertools.product(decodes, prefills))
    assert len(every) == 4
    for paired.frontend_url in (old_url, new_url):
        paired.wait_ready(*everybody)
        with checked(paired, oracle) as check, check.load(threads=3, seed=15_000) as load:
            until(lambda: every <= pairs(load), 60, "each prefill worker served each decode worker")
        assert load.seen("path") == {"remote"}
        assert load.slowest_s < SLOW_S
    with checked(paired, oracle) as check, check.load(threads=3, seed=16_000) as load:
        for old in olds:
            assert old.stop(60.0) == 0
            load.more(4)
    assert load.slowest_s < SLOW_S
