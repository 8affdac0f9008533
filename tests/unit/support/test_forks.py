"""A run with `--forks` has the same results and output as a run in one process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.support.forks import PIECE, pieces

ROOT = Path(__file__).parents[3]
CONFTEST = """
import pytest, signal
from pathlib import Path
from tests.support.forks import Forks

# A shell's background job is started with SIGINT ignored, and so is all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

def pytest_configure(config):
    config.pluginmanager.register(Forks(2, lambda item: None))

@pytest.fixture(scope="session")
def held(tmp_path_factory):
    ended = Path(__file__).with_name("ended")
    yield tmp_path_factory.mktemp("held")
    with ended.open("a") as file:
        file.write("x")
"""


def start(folder: Path, tests: str, *arguments: str) -> subprocess.Popen[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error")
    (folder / "test_it.py").write_text("import os, pytest, signal, sys, time, warnings\n" + tests)
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rA", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


MIXED = """
@pytest.mark.parametrize("n", range(20))
def test_many(n, held, tmp_path): assert held.is_dir()
def test_wrong(capfd):
    sys.stderr.write("said before")
    assert [1] == [2], "because"
def test_told():
    print("printed")
    pytest.fail("told")
def test_skipped(): pytest.skip("no reason")
@pytest.mark.xfail
def test_known(): assert 0
def test_killed(held): os.kill(os.getpid(), signal.SIGKILL)
def test_after(held): pass
def test_crashes():
    import faulthandler
    faulthandler._sigabrt()
def test_warns(): warnings.warn("old")
def test_late():
    async def never(): pass
    never()
"""


def test_outcomes_and_texts_reach_the_parent(tmp_path: Path) -> None:
    with start(tmp_path, MIXED, "--junitxml=report.xml") as process:
        said = process.communicate()[0]
    assert process.returncode == 1
    assert "6 failed, 21 passed, 1 skipped, 1 xfailed" in said, said
    for text in ("assert [1] == [2]", "because", "SKIPPED [1] test_it.py", "no reason", "old"):
        assert text in said
    assert re.search("Captured stdout call -+\nprinted", said)
    assert "the test process ended in this test, with exit code -9" in said
    assert re.search("ended in this test, with exit code -6\nFatal(.*\n)+.*in test_crashes", said)
    assert "never awaited" in said
    cases = ElementTree.parse(tmp_path / "report.xml").getroot().findall(".//testcase")
    assert len(cases) == 29
    assert (tmp_path / "ended").read_text() in ("x", "xx"), "of each process that was not killed"


def test_one_failure_is_enough_where_that_was_asked(tmp_path: Path) -> None:
    tests = """
@pytest.mark.parametrize("n", range(60))
def test_many(n, held):
    with open(f"begun{os.getpid()}", "w"): pass
    while len([name for name in os.listdir() if name.startswith("begun")]) < 2: time.sleep(0.01)
    time.sleep(0.02)
    assert n != 3
"""
    with start(tmp_path, tests, "-x") as process:
        said = process.communicate()[0]
    assert process.returncode == 1
    assert "1 failed" in said
    assert "stopping after 1 failures" in said
    assert said.count("PASSED") < 40
    assert (tmp_path / "ended").read_text() == "xx"


LONG = """
@pytest.mark.parametrize("n", range(20))
def test_long(n, held):
    with open(f"begun{n}", "w"): pass
"""
SLEEPS = """
    time.sleep(60)
"""
SWALLOWS_THE_FIRST = """
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(60)
"""


@pytest.mark.parametrize("waits", [SLEEPS, SWALLOWS_THE_FIRST], ids=["sleeps", "swallows"])
def test_an_interrupt_takes_fixtures_down(tmp_path: Path, waits: str) -> None:
    """A test that swallows the first interrupt gets another."""
    with start(tmp_path, LONG + waits) as process:
        give_up = time.monotonic() + 30
        while len(list(tmp_path.glob("begun*"))) < 2:
            assert time.monotonic() < give_up
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in process.communicate(timeout=25)[0]
    assert process.returncode == 2
    assert (tmp_path / "ended").read_text() == "xx"


def test_pieces_are_neighbours_of_one_file() -> None:
    files = ["a"] * (PIECE + 1) + ["b"] + ["large"] * (2 * PIECE) + ["c"]
    items: list[Any] = [SimpleNamespace(path=name) for name in files]
    cut = pieces(items, lambda item: "large" if str(item.path) == "large" else None)
    assert [len(piece) for piece in cut] == [PIECE, 1, 1, 2 * PIECE, 1]
    assert [index for piece in cut for index in piece] == list(range(len(items)))


def test_forks_and_xdist_exclude_each_other(request: pytest.FixtureRequest) -> None:
    rules: Any = request.config.pluginmanager.get_plugin(str(ROOT / "conftest.py"))
    both: Any = SimpleNamespace(getoption=lambda name, default=None: 2)
    with pytest.raises(pytest.UsageError, match="not both"):
        rules.pytest_configure(both)
