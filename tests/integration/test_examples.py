"""Each example runs as its first lines say, and prints what it should. One cluster for all."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command_line import cluster, detached

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of the frontend of a cluster that runs."""
    state = tmp_path_factory.mktemp("examples") / "state"
    flags = ("--enable-auto-tool-choice", "--tool-call-parser=hermes", "--port=0")
    with detached(state, *flags):
        yield cluster(state).frontend_url


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        capture_output=True,
        text=True,
        timeout=90.0,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_chat(url: str) -> None:
    said = run("chat.py", url)
    first, second = (line for line in said.splitlines() if "prompt tokens: " in line)
    assert ": 0 cached" in first
    assert ": 0 cached" not in second


def test_tools(url: str) -> None:
    said = run("tools.py", url)
    assert "the model calls weather({" in said
    assert "the sun shines" in said
    assert "\nassistant: " in said


def test_batch(url: str, tmp_path: Path) -> None:
    asked, answers = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    lines = (ROOT / "examples" / "batch.jsonl").read_text().splitlines(keepends=True)
    asked.write_text("".join(lines[:20]))
    assert run("batch.py", str(asked), str(answers), url).startswith("20 answered, 0 failed")
    asked.write_text("".join(lines))
    said = run("batch.py", str(asked), str(answers), url)
    assert said.startswith(f"{len(lines) - 20} answered, 0 failed, 20 were there")
    written = [json.loads(line) for line in answers.read_text().splitlines()]
    assert {w["custom_id"] for w in written} == {json.loads(line)["custom_id"] for line in lines}
    assert all(w["response"]["body"]["choices"] for w in written)


def test_every_example_has_a_test() -> None:
    """Here, or in test_tour.py, which runs the commands of the tour."""
    text = Path(__file__).read_text() + (ROOT / "docs" / "tour.md").read_text()
    scripts = [path.name for path in (ROOT / "examples").glob("*.py")]
    assert len(scripts) > 3
    known = re.findall(r'(?:run\("|python examples/)(\w+\.py)', text)
    assert set(scripts) <= set(known)
