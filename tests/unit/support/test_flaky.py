"""The command that repeats tests sees what differed between runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

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


def _runs(tmp_path: Path, *runs: Sequence[tuple[str, str]]) -> flaky.Runs:
    """One JUnit report for each of `runs`: names of tests with the marks inside their elements."""
    seen = flaky.Runs()
    report = tmp_path / "report.xml"
    for tests in runs:
        cases = [f'<testcase classname="t" name="{n}" time="1">{m}</testcase>' for n, m in tests]
        report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
        seen.add([report], 2.0)
    return seen


def test_a_test_that_fails_in_one_run_is_named_with_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_it.py").write_text(SECOND_TIME)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # wherever the folder lies
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(flaky.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    assert flaky.main(["--runs", "2", "-p", "no:cacheprovider", "test_it.py"]) == 1
    said = capsys.readouterr().out
    assert "test_it.py::test_every_second_time: failure 1, passed 1" in said
    assert "1 x AssertionError: the second time" in said
    assert "test_it.py::test_steady:" not in said
    assert [log.name for log in tmp_path.glob("run-*.log")] == ["run-2.log"]


def test_kept_runs_count_unless_they_are_of_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_it.py").write_text("def test_steady(): pass")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    again = ["--keep", "kept", "-p", "no:cacheprovider", "test_it.py"]
    assert flaky.main(["--runs", "1", *again]) == 0
    (tmp_path / "kept" / "run-3-0.xml").write_text("of a run that was interrupted")
    capsys.readouterr()
    assert flaky.main(["--runs", "2", *again]) == 0
    said = capsys.readouterr().out
    assert "(before)\nrun 2: 1 passed" in said
    assert "2 runs: median" in said
    (tmp_path / "kept" / "commit").write_text("another")
    with pytest.raises(SystemExit, match="holds runs of another"):
        flaky.main(["--runs", "3", *again])


@pytest.mark.parametrize(
    ("first", "second", "good"),
    [
        ("", "", True),
        ("<skipped/>", "<skipped/>", True),
        ("", "<skipped/>", False),
        ('<failure message="no"/>', '<failure message="no"/>', False),
        ("", '<error message="in its teardown"/>', False),
    ],
)
def test_only_the_same_good_outcome_in_every_run_is_steady(
    tmp_path: Path, first: str, second: str, good: bool
) -> None:
    assert _runs(tmp_path, [("a", first)], [("a", second)]).good is good


def test_a_test_that_one_run_left_out_is_named(tmp_path: Path) -> None:
    runs = _runs(tmp_path, [("a", ""), ("b", "")], [("a", "")])
    assert not runs.good
    assert "t.py::b: passed 1, not run 1" in runs.lines()


def test_an_error_in_teardown_counts_once(tmp_path: Path) -> None:
    runs = _runs(tmp_path, [("a", ""), ("a", '<error message="open socket"/>')])
    assert "t.py::a: error 1" in runs.lines()
    assert "    1 x open socket" in runs.lines()


def test_a_run_without_a_test_is_not_steady(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no test ran"):
        _runs(tmp_path, [])
    assert not flaky.Runs().good


def test_busy_processes_end() -> None:
    with flaky.busy(2):
        pass  # each was killed and waited for, or this would not end


def test_without_arguments_the_parts_of_make_test_are_repeated() -> None:
    lines = (Path(__file__).parents[3] / "Makefile").read_text().splitlines()
    tests = " ".join(next(line for line in lines if line.startswith("ENGINE_TESTS")).split()[3:])
    recipes = [
        line.partition("pytest -q ")[2].replace("$(ENGINE_TESTS)", tests.rstrip(")"))
        for start in ("test-fast:", "test:")
        for line in recipe(lines, start)
    ]
    assert [r.removesuffix(" $(PYTEST_ARGS)").replace('"', "'") for r in recipes] == list(
        flaky.WHOLE
    )


def recipe(lines: list[str], start: str) -> list[str]:
    """What the Makefile's target does."""
    rest = lines[next(i for i, line in enumerate(lines) if line.startswith(start)) + 1 :]
    return list(itertools.takewhile(lambda line: line.startswith("\t"), rest))
