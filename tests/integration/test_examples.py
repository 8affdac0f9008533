"""Each example runs as its first lines say, and prints what it should. One cluster for most."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pullfill.testing import LocalCluster, cluster

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.fixture(scope="module")
def shared() -> Iterator[LocalCluster]:
    with cluster("--enable-auto-tool-choice", "--tool-call-parser=hermes", prefill=2) as c:
        yield c


def run(name: str, *arguments: str, state: Path | None = None, timeout: float = 90.0) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | ({"PULLFILL_STATE_DIR": str(state)} if state else {}),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_chat(shared: LocalCluster) -> None:
    said = run("chat.py", shared.url)
    first, second = (line for line in said.splitlines() if "prompt tokens: " in line)
    assert ": 0 cached" in first
    assert ": 0 cached" not in second


def test_tools(shared: LocalCluster) -> None:
    said = run("tools.py", shared.url)
    assert "the model calls weather({" in said
    assert "the sun shines" in said
    assert "\nassistant: " in said


def test_batch(shared: LocalCluster, tmp_path: Path) -> None:
    asked, answers = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    lines = (ROOT / "examples" / "batch.jsonl").read_text().splitlines(keepends=True)
    asked.write_text("".join(lines[:20]))
    assert run("batch.py", str(asked), str(answers), shared.url).startswith("20 answered, 0 failed")
    asked.write_text("".join(lines))
    said = run("batch.py", str(asked), str(answers), shared.url)
    assert said.startswith(f"{len(lines) - 20} answered, 0 failed, 20 were there")
    written = [json.loads(line) for line in answers.read_text().splitlines()]
    assert {w["custom_id"] for w in written} == {json.loads(line)["custom_id"] for line in lines}
    assert all(w["response"]["body"]["choices"] for w in written)


def test_kill_then_drain(shared: LocalCluster) -> None:
    """In this order: the killed worker starts again, the drained one does not."""
    said = run("kill.py", shared.url)
    assert "killing prefill-" in said
    told = re.search(r"32 answers: (\d+) prefilled remotely", said)
    assert told
    assert int(told[1]) > 8  # on a slow machine some wait too long, and stay local
    said = run("drain.py", shared.url, state=shared.state_dir)
    assert "16 of 16 answers are complete" in said
    assert said.rstrip().endswith("is gone: True")


def test_two_models() -> None:
    said = run("two_models.py", timeout=280)
    assert "large at http" in said
    assert said.rstrip().splitlines()[-1].startswith("small at http")
    assert "path remote" in said
    assert said.count("path ") == 2


def test_every_example_has_a_test() -> None:
    text = Path(__file__).read_text()
    scripts = [path.name for path in (ROOT / "examples").glob("*.py")]
    assert len(scripts) > 5
    assert [name for name in scripts if f'run("{name}"' not in text] == []
