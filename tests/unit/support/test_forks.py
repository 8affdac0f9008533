"""A run with `--forks` has the same results and output as a run in one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[3]
CONFTEST = """
import os, pytest, signal
from pathlib import Path
from tests.support.forks import Forks

# A shell's background job is started with SIGINT ignored, and so is all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

def pytest_configure(config):
    together = lambda item: "pair" if "pair" in item.name else None
    config.pluginmanager.register(Forks(int(os.environ["FORKS"]), together))

@pytest.fixture(scope="session")
def held(tmp_path_factory):
    ended = Path(__file__).with_name("ended")
    yield tmp_path_factory.mktemp("held")
    with ended.open("a") as file:
        file.write("x")
"""


def start(folder: Path, tests: str, *arguments: str, forks: int = 2) -> subprocess.Popen[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error")
    (folder / "test_it.py").write_text("import os, pytest, signal, sys, time, warnings\n" + tests)
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rA", *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "FORKS": str(forks),
        },
        stdout=subprocess.PIPE,
        text=True,
    )


PAIR = """
def test_pair(held): pass
def test_pair_again(held): assert not os.path.exists("ended")
def test_other(held):
    with open("ended") as file: assert file.read() == "x"
"""


def test_session_fixtures_end_with_the_last_test_of_those_together(tmp_path: Path) -> None:
    with start(tmp_path, PAIR, forks=1) as process:
        said = process.communicate()[0]
    assert "3 passed" in said, said


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


LEFT = """
import socket
@pytest.fixture(scope="session")
def left():
    yield
    ring = [socket.socket()]
    ring.append(ring)
def test_wrong(left): assert [1] == [2], "because"
"""


def test_what_the_collector_finds_too_late_hides_no_failure(tmp_path: Path) -> None:
    with start(tmp_path, LEFT) as process:
        said = process.communicate()[0]
    for text in ("cannot go on", "unclosed <socket", "assert [1] == [2]", "1 failed"):
        assert text in said, said


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
