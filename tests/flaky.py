"""Repeat tests and list what differed between the runs: `make flaky N=10 ARGS="tests/chaos"`.

Without ARGS each run is all tests of `make test`, without its lint. Each run is a pytest process of
its own, or one for each part of `make test`. The report names every test that failed in any run,
with the first line of each failure, and every test whose outcome changed. It says how many tests
each run skipped, by reason. With --busy, processes that compute all the time share the cores with
the tests: a machine that others use.

Ten runs take hours. `--keep DIR` keeps the reports. The next `--keep DIR` goes on after the runs
that are there. It refuses them if they are of another commit, of other ARGS or of another --busy.

Exit status: 0 if all runs ended with exit code 0, had the same outcomes, and took no longer than
--within. 1 otherwise. The output of failed runs stays in the directory that the last line names.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

MARKS = ("failure", "error", "skipped")
SLOWEST = 10
WHOLE = (
    "--forks 8 tests/unit tests/contract",
    "-n 2 --dist loadfile --no-loadscope-reorder -m 'not long' "
    "benchmarks/tests tests/integration tests/chaos tests/netns tests/gpu",
)
"""What pytest is given in `make test`, part by part."""
MOST_MIN = 18.0
"""How many minutes all these tests may take on two busy cores."""
_SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"


@dataclass(slots=True)
class Seen:
    """What one test did in all runs."""

    outcomes: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Runs:
    """The results of all runs so far.

    seconds: how long each run took.
    within_s: how long a run may take."""

    tests: dict[str, Seen] = field(default_factory=lambda: defaultdict(Seen))
    seconds: list[float] = field(default_factory=list)
    skips: list[Counter[str]] = field(default_factory=list)
    """Of each whole run: how many tests it skipped, by reason."""
    broken: dict[int, str] = field(default_factory=dict)
    """What went wrong outside of all tests, by the number of the run."""
    within_s: float = math.inf

    def add(self, reports: Sequence[Path], seconds: float) -> Counter[str]:
        """Take in the JUnit reports of one run. Returns how many tests had which outcome.

        Raises ElementTree.ParseError or OSError when one is missing, AssertionError when they name
        no test."""
        roots = [ElementTree.parse(report).getroot() for report in reports]
        cases = [case for root in roots for case in root.findall(".//testcase")]
        assert cases, "no test ran"
        found: dict[str, str] = {}
        skipped: dict[str, str] = {}
        for case in cases:
            name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            mark = next((m for m in case if m.tag in MARKS), None)
            outcome = "passed" if mark is None else mark.tag
            # A test that passed and failed in its teardown comes twice: the failure counts.
            if found.get(name, "passed") == "passed":
                found[name] = outcome
            seen = self.tests[name]
            seen.seconds.append(float(case.get("time", 0.0)))
            if mark is not None:
                message = (mark.get("message") or "no message").splitlines()[0][:160]
                if mark.tag == "skipped":
                    skipped[name] = message
                else:
                    seen.messages[message] += 1
        for name, outcome in found.items():
            self.tests[name].outcomes[outcome] += 1
        self.skips.append(Counter(skipped.values()))
        self.seconds.append(seconds)
        return Counter(found.values())

    def lines(self) -> list[str]:
        """The report, for people."""
        total = len(self.seconds)
        said = []
        if total:
            said.append(f"{total} runs: median {median(self.seconds):.0f} s, "
                        f"longest {max(self.seconds):.0f} s")  # fmt: skip
        for name, seen in sorted(self.tests.items()):
            if not self.steady(seen):
                counts = ", ".join(f"{k} {v}" for k, v in sorted(seen.outcomes.items()))
                missing = total - seen.outcomes.total()
                said.append(f"{name}: {counts}" + (f", not run {missing}" if missing else ""))
                said += [f"    {n} x {message}" for message, n in seen.messages.most_common()]
        said += self.skipped()
        slow = sorted(self.tests.items(), key=lambda item: -median(item[1].seconds))[:SLOWEST]
        said += ["slowest, median and longest seconds:"]
        said += [f"  {median(s.seconds):6.1f} {max(s.seconds):6.1f}  {name}" for name, s in slow]
        said += [f"run {number}: {why}" for number, why in sorted(self.broken.items())]
        if total and max(self.seconds) > self.within_s:
            late = sum(s > self.within_s for s in self.seconds)
            said.append(f"{late} of {total} runs took longer than {self.within_s / 60:g} minutes")
        return said

    def skipped(self) -> list[str]:
        """One line for each reason, with the number of tests that each run skipped for it."""
        said = []
        for reason in sorted(set().union(*self.skips)):
            counts = [skips[reason] for skips in self.skips]
            each = ", ".join(map(str, counts))
            how = f"{counts[0]} in each run" if len(set(counts)) == 1 else f"run by run {each}"
            said.append(f"skipped, {how}: {reason}")
        return said

    def steady(self, seen: Seen) -> bool:
        """The same good outcome in every run."""
        (outcome, count), *others = seen.outcomes.most_common()
        good = outcome in ("passed", "skipped") and not others
        return good and count == len(self.seconds)

    @property
    def good(self) -> bool:
        """Whether all runs had the same good outcomes, and none of them took too long."""
        same = bool(self.tests) and all(map(self.steady, self.tests.values()))
        return same and not self.broken and max(self.seconds) <= self.within_s


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes compute meanwhile. They also end when this process dies."""
    spinning = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def run_once(number: int, folder: Path, parts: Sequence[Sequence[str]], runs: Runs) -> None:
    """Run pytest once for each part; the output is kept only if one failed.

    Raises KeyboardInterrupt. Then nothing of the run is left."""
    log, codes = log_of(folder, number), list[int]()
    reports = reports_of(folder, number, len(parts))
    for report in reports:
        report.unlink(missing_ok=True)  # of a run that was killed
    started = time.monotonic()
    try:
        with log.open("wb") as out:
            for report, args in zip(reports, parts, strict=True):
                command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *args]
                done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False)
                codes.append(done.returncode)
    except KeyboardInterrupt:
        for left in (log, *reports):  # pytest also writes a report when it is interrupted
            left.unlink(missing_ok=True)
        raise
    code = next(filter(None, codes), 0)
    if code == 0:
        log.unlink()
    seconds = time.monotonic() - started
    try:
        counts = runs.add(reports, seconds)
        odd = [
            code for code, report in zip(codes, reports, strict=True) if unexplained(code, report)
        ]
        if odd:
            runs.broken[number] = f"pytest ended with exit code {odd[0]}"
    except (OSError, ElementTree.ParseError, AssertionError):
        runs.broken[number] = f"pytest ended with exit code {code} and without a report"
        counts = Counter()
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    print(f"run {number}: {said or 'no report'} in {seconds:.0f} s (exit {code})", flush=True)


def unexplained(code: int, report: Path) -> bool:
    """Whether pytest's exit code says more than that a test in its report failed."""
    return code not in (0, 1) or (code == 1 and not failed(report))


def failed(report: Path) -> bool:
    """Whether a test in the JUnit report failed."""
    root = ElementTree.parse(report).getroot()
    return any(root.find(f".//testcase/{mark}") is not None for mark in ("failure", "error"))


def mark(args: Sequence[str], busy: int) -> str:
    """What runs must have in common to be compared: the commit, --busy and ARGS.

    Outside of a git repository the commit is empty. Raises SystemExit if there are changes that no
    commit has."""
    head = ["git", "describe", "--always", "--abbrev=40", "--dirty"]
    commit = subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip()
    if commit.endswith("-dirty"):
        raise SystemExit("--keep compares runs of one commit: commit or stash your changes first")
    options = ["--busy", str(busy)] if busy else []
    return " ".join([commit, *options, *map(shlex.quote, args)])


def kept(folder: Path, now: str, parts: int, runs: Runs) -> int:
    """Take in the runs that the folder holds. Returns how many those are.

    now: the mark of the runs that will follow. Raises SystemExit if the folder has another one."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "commit"
    if (before := file.read_text() if file.exists() else now) != now:
        raise SystemExit(f"{folder} holds runs of {before}, this is {now}: name another directory")
    file.write_text(now)
    number = 0
    reports = reports_of(folder, 1, parts)
    while all(report.exists() for report in reports):
        number += 1
        suites = [ElementTree.parse(report).getroot().find("testsuite") for report in reports]
        seconds = sum(float(s.get("time", 0)) for s in suites if s is not None)
        counts = runs.add(reports, seconds)
        # The log of a run is kept only if an exit code was not 0.
        if log_of(folder, number).exists() and not any(map(failed, reports)):
            runs.broken[number] = "pytest ended with an exit code other than 0"
        said = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
        print(f"run {number}: {said} in {seconds:.0f} s (before)", flush=True)
        reports = reports_of(folder, number + 1, parts)
    return number


def log_of(folder: Path, number: int) -> Path:
    """What all parts of one run printed."""
    return folder / f"run-{number}.log"


def reports_of(folder: Path, number: int, parts: int) -> list[Path]:
    """The JUnit reports of one run. pytest writes each when its part has ended."""
    return [folder / f"run-{number}-{index}.xml" for index in range(parts)]


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="tests.flaky", description=about, allow_abbrev=False)
    parser.add_argument("-n", "--runs", type=int, default=10, help="how often (default 10)")
    parser.add_argument("--busy", type=int, default=0, metavar="N",
                        help="keep N processes computing meanwhile (default 0)")  # fmt: skip
    parser.add_argument(
        "--keep", metavar="DIR", help="keep the reports there, and go on after them"
    )
    parser.add_argument("--within", type=float, metavar="MINUTES",
                        help=f"longest time of a run (without ARGS: {MOST_MIN:g})")  # fmt: skip
    chosen, rest = parser.parse_known_args(argv)
    if chosen.runs < 1:
        parser.error("--runs must be at least 1")
    parts = [rest] if rest else [shlex.split(part) for part in WHOLE]
    now = mark(rest, chosen.busy) if chosen.keep else ""
    folder = Path(chosen.keep or tempfile.mkdtemp(prefix="pullfill-flaky-"))
    most_min = chosen.within or (math.inf if rest else MOST_MIN)
    runs = Runs(within_s=60 * most_min)
    done = kept(folder, now, len(parts), runs) if chosen.keep else 0
    with busy(chosen.busy), contextlib.suppress(KeyboardInterrupt):
        for number in range(done + 1, chosen.runs + 1):
            run_once(number, folder, parts, runs)
            done = number
    print("\n".join(runs.lines()))
    if missing := max(0, chosen.runs - done):
        print(f"interrupted: {missing} of {chosen.runs} runs are missing")
    verdict = ("steady so far" if missing else "steady") if runs.good else "NOT steady"
    print(f"{verdict if done else 'no run ended'}; logs of failed runs: {folder}")
    return 0 if runs.good and not missing else 1


if __name__ == "__main__":
    os.environ.pop("PYTEST_ADDOPTS", None)
    sys.exit(main())
