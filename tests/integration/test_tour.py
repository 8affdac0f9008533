"""Runs the commands of README.md and docs/tour.md, in order, on one cluster with the demo model.

Each bash block must print its phrases in `PROMISED`, and a text block below it shows at least one
of them: the page shows excerpts. Identifiers, times and the model's text differ from run to run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.etcd import free_ports

ROOT = Path(__file__).parents[2]
START = "make up ARGS=--detach"
MARK = "=== block "
PROMISED = (
    ("ready: http://127.0.0.1:8000/v1 serves demo",),
    ("(reason: cost_probe)", "(1 attempt)"),
    ("(reason: cost_", "0 cached"),
    ("= 1280 cached",),
    ("is pulling (demo)", "role    state"),
    ("32 answers: ", "killing prefill-"),
    ("(reason: policy_always_local)", "'sometimes' is not allowed", "router.policy = cost"),
    (" is gone after ", '"degraded":true', "(reason: no_prefill_worker)"),
    ("decode-0     stopped after", "etcd         stopped after"),
)
"""By block: the two of the README, then those of the tour, whose start is the README's."""


def blocks(name: str) -> list[tuple[str, str]]:
    """Each bash block of a document with the text block that follows it, or ''."""
    found: list[tuple[str, str]] = []
    for language, body in re.findall(
        r"^```(bash|text)\n(.*?)^```", (ROOT / name).read_text(), re.M | re.S
    ):
        if language == "bash":
            found.append((body, ""))
        elif found and not found[-1][1]:
            found[-1] = (found[-1][0], body)
    return found


def tour() -> list[tuple[str, str]]:
    readme, page = blocks("README.md"), blocks("docs/tour.md")
    assert readme[0][0].startswith(START)
    assert page[0][0].startswith(START)
    # One cluster for both: the README starts it, and the tour shows what that prints.
    return [(readme[0][0], page[0][1]), *readme[1:], *page[1:]]


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_command_does_what_the_page_shows(state: Path, tmp_path: Path) -> None:
    steps = tour()
    assert len(steps) == len(PROMISED)
    port = str(free_ports(1)[0])
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    # A worker that the script starts must not outlive a script that fails.
    script = "trap 'kill $(jobs -p) 2>/dev/null' EXIT\n"
    script += "".join(f"echo '{MARK}'\n{commands}" for commands, _ in steps)
    script = re.sub(rf"^{START}", f"pullfill up --detach --port {port}", script, flags=re.M)
    script = script.replace("source .venv/bin/activate\n", "").replace("8000", port)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    printed = done.stdout.replace(port, "8000")
    said = printed.split(MARK + "\n")[1:]
    assert len(said) == len(steps), printed
    for (commands, shown), real, phrases in zip(steps, said, PROMISED, strict=True):
        assert not shown or any(p in shown for p in phrases), f"shows something else:\n{commands}"
        assert [p for p in phrases if p not in real] == [], f"{commands}\nprinted:\n{real}"
        assert "Traceback" not in real, real
