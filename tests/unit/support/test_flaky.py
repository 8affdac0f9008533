"""The command that repeats tests sees what differed between runs."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Sequence
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


def _runs(tmp_path: Path, *runs: Sequence[tuple[str, str]]) -> flaky.Runs:
    """One JUnit report for each of `runs`: names of tests with the marks inside their elements."""
    seen = flaky.Runs()
    report = tmp_path / "report.xml"
    for tests in runs:
        cases = [f'<testcase classname="t" name="{n}" time="1">{m}</testcase>' for n, m in tests]
        report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
        seen.add([report], 2.0)
    return seen


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a pytest of its own, outside any git repository."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    return tmp_path


STEADY = ["--keep", "kept", "-p", "no:cacheprovider", "test_it.py"]
"""The command line after --runs. The reports stay in `kept`."""


def test_a_test_that_fails_in_one_run_is_named_with_its_message(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "test_it.py").write_text(SECOND_TIME)
    monkeypatch.setattr(flaky.tempfile, "mkdtemp", lambda prefix: str(here))
    assert flaky.main(["--runs", "2", "-p", "no:cacheprovider", "test_it.py"]) == 1
    said = capsys.readouterr().out
    assert "test_it.py::test_every_second_time: failure 1, passed 1" in said
    assert "1 x AssertionError: the second time" in said
    assert "test_it.py::test_steady:" not in said
    assert [log.name for log in here.glob("run-*.log")] == ["run-2.log"]


def test_kept_runs_count_unless_they_are_of_other_code(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "test_it.py").write_text("def test_steady(): pass")
    assert flaky.main(["--runs", "1", *STEADY]) == 0
    (here / "kept" / "run-3-0.xml").write_text("of a run that was interrupted")
    capsys.readouterr()
    assert flaky.main(["--runs", "2", *STEADY]) == 0
    said = capsys.readouterr().out
    assert "(before)\nrun 2: 1 passed" in said
    assert "2 runs: median" in said
    (here / "kept" / "commit").write_text("another")
    with pytest.raises(SystemExit, match="holds runs of another"):
        flaky.main(["--runs", "3", *STEADY])


def test_an_exit_code_that_no_failed_test_explains_is_not_steady(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "test_it.py").write_text("def test_steady(): pass")
    (here / "conftest.py").write_text(
        "def pytest_sessionfinish(session): session.exitstatus = 3"
    )  # as after an error outside all tests
    for now in ("", "before"):
        assert flaky.main(["--runs", "1", *STEADY]) == 1, now
        said = capsys.readouterr().out
        assert "NOT steady" in said
        assert (
            f"run 1: pytest ended with {'an exit code other than 0' if now else 'exit code 3'}"
            in said
        )


def test_a_failed_test_explains_exit_code_1_only(here: Path) -> None:
    report = here / "report.xml"
    report.write_text(
        '<testsuite><testcase name="a"><failure message="no"/></testcase></testsuite>'
    )
    assert [flaky.unexplained(code, report) for code in (0, 1, 2)] == [False, False, True]


def test_an_interrupted_run_is_missing_and_leaves_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "test_it.py").write_text("def test_steady(): pass")
    run, pytests = subprocess.run, itertools.count(1)

    def interrupted(command: list[str], **options: object) -> object:
        """Ctrl-C in the second pytest, which then writes the report of what it has run."""
        done = run(command, **options)  # type: ignore[call-overload]
        if "pytest" in command and next(pytests) == 2:
            assert (here / "kept" / "run-2-0.xml").exists()
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(flaky.subprocess, "run", interrupted)
    assert flaky.main(["--runs", "3", *STEADY]) == 1
    said = capsys.readouterr().out
    assert "interrupted: 2 of 3 runs are missing" in said
    assert "\nsteady;" not in said
    assert sorted(f.name for f in (here / "kept").iterdir()) == ["commit", "run-1-0.xml"]
    assert flaky.main(["--runs", "3", *STEADY]) == 0
    assert "\nsteady;" in capsys.readouterr().out


def test_a_report_of_an_earlier_try_is_not_taken_for_that_of_a_crash(here: Path) -> None:
    (here / "test_it.py").write_text("import os\ndef test_crash(): os._exit(9)")
    stale = '<testsuite><testcase classname="test_it" name="test_crash"/></testsuite>'
    (here / "run-1-0.xml").write_text(stale)
    runs = flaky.Runs()
    flaky.run_once(1, here, [["-p", "no:cacheprovider", "test_it.py"]], runs)
    assert "run 1: pytest ended with exit code 9 and without a report" in runs.lines()


@pytest.mark.parametrize(
    "other", [["--busy", "1", *STEADY], [*STEADY, "-v"]], ids=["busy", "arguments"]
)
def test_kept_runs_of_other_tests_or_a_busier_machine_are_refused(
    here: Path, other: list[str]
) -> None:
    (here / "test_it.py").write_text("def test_steady(): pass")
    assert flaky.main(["--runs", "1", *STEADY]) == 0
    with pytest.raises(SystemExit, match="name another directory"):
        flaky.main(["--runs", "2", *other])


def test_only_a_commit_can_be_kept_and_its_id_alone_means_the_defaults(here: Path) -> None:
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost"]
    (here / "test_it.py").write_text("def test_steady(): pass")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "a test"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    ref = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert flaky.mark([], 0) == ref.stdout.strip()
    assert flaky.mark(["tests/chaos"], 2) == f"{ref.stdout.strip()} --busy 2 tests/chaos"
    (here / "test_it.py").write_text("def test_changed(): pass")
    with pytest.raises(SystemExit, match="commit or stash"):
        flaky.main(["--runs", "1", *STEADY])
    assert not (here / "kept").exists()


def test_skipped_tests_are_counted_by_reason_in_each_run(tmp_path: Path) -> None:
    root, gpu = '<skipped message="needs root"/>', '<skipped message="needs a GPU"/>'
    runs = _runs(
        tmp_path, [("a", root), ("b", root), ("c", gpu)], [("a", root), ("b", root), ("c", root)]
    )
    assert "skipped, run by run 2, 3: needs root" in runs.lines()
    assert "skipped, run by run 1, 0: needs a GPU" in runs.lines()
    assert "skipped, 1 in each run: needs root" in _runs(tmp_path, [("a", root)]).lines()


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


def test_a_run_that_takes_too_long_is_not_steady(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "test_it.py").write_text("def test_steady(): pass")
    assert flaky.main(["--runs", "1", "--within", "0.0001", *STEADY]) == 1
    said = capsys.readouterr().out
    assert "1 of 1 runs took longer than 0.0001 minutes" in said
    assert "NOT steady" in said
    assert flaky.main(["--runs", "1", "--within", "60", *STEADY]) == 0


def test_an_error_in_teardown_counts_once(tmp_path: Path) -> None:
    runs = _runs(tmp_path, [("a", ""), ("a", '<error message="open socket"/>')])
    assert "t.py::a: error 1" in runs.lines()
    assert "    1 x open socket" in runs.lines()


def test_a_run_without_a_test_is_not_steady(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no test ran"):
        _runs(tmp_path, [])
    assert not flaky.Runs().good


def test_busy_processes_end() -> None:
    before = psutil.Process().children()
    with flaky.busy(2):
        assert len(psutil.Process().children()) == len(before) + 2
    assert psutil.Process().children() == before


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


def test_the_help_says_what_is_repeated() -> None:
    assert "all tests of `make test`, without its lint" in " ".join((flaky.__doc__ or "").split())
