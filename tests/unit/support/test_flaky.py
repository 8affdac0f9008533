"""The command that repeats tests sees what differed between runs."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests import flaky

SECOND_TIME = """
import pathlib
here = pathlib.Path(__file__).with_name("count")
def test_steady(): pass
def test_every_second_time():
    count = int(here.read_text()) + 1 if here.exists() else 1
    here.write_text(str(count))
    assert count % 2, "the second time"
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a pytest of its own. The logs go there, too."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(flaky.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    return tmp_path


def runs(count: int) -> int:
    return flaky.main(["--runs", str(count), "-p", "no:cacheprovider", "test_it.py"])


def test_a_test_that_fails_in_one_run_is_named_with_its_message(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "test_it.py").write_text(SECOND_TIME)
    assert runs(2) == 1
    said = capsys.readouterr().out
    assert "test_it.py::test_every_second_time: failure 1, passed 1" in said
    assert "1 x AssertionError: the second time" in said
    assert "test_it.py::test_steady:" not in said
    assert [log.name for log in here.glob("run-*.log")] == ["run-2.log"]


@pytest.mark.parametrize(
    ("code", "steady"),
    [("def test_it(): pass", 0), ("", 1), ("import nothing_of_that_name", 1)],
    ids=["good", "no test", "no import"],
)
def test_a_run_without_a_good_test_is_not_steady(here: Path, code: str, steady: int) -> None:
    (here / "test_it.py").write_text(code)
    assert runs(1) == steady


def test_an_error_in_teardown_counts_once(tmp_path: Path) -> None:
    case = '<testcase classname="t" name="a" time="1">{}</testcase>'
    cases = case.format("") + case.format('<error message="open socket"/>')
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert flaky.outcomes(report) == {"t.py::a": ("error", "open socket")}


def test_busy_processes_end() -> None:
    before = psutil.Process().children()
    with flaky.busy(2):
        assert len(psutil.Process().children()) == len(before) + 2
    assert psutil.Process().children() == before


def test_without_arguments_the_parts_of_make_test_are_repeated() -> None:
    make = (Path(__file__).parents[3] / "Makefile").read_text()
    fast, engines = flaky.WHOLE
    options, tests = engines.replace("'", '"').split(' "not long" ')
    assert fast in make
    assert f'{options} "not long" $(ENGINE_TESTS)' in make
    assert f"ENGINE_TESTS := $(wildcard {tests})" in make
