"""Repeat tests and list what differed between the runs: `make flaky N=10 ARGS="tests/chaos"`.

Without ARGS each run is all of `make test`. Each run is a pytest process of its own, or one for
each part of `make test`. The report names every test that failed in any run, with
the first line of each failure, and every test whose outcome changed. With --busy, processes that
compute all the time share the cores with the tests: a machine that others use.

Ten runs take hours. `--keep DIR` keeps the reports, and goes on after those that are there, if they
are of the same commit.

Exit status: 0 when every run passed with the same outcomes, 1 otherwise. The output of failed runs
stays in the directory that the last line names.
"""

from __future__ import annotations

import argparse
import contextlib
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
    "-n 2 --dist loadfile --no-loadscope-reorder -m 'not long and not alone' "
    "benchmarks/tests tests/integration tests/chaos tests/netns tests/gpu",
    "-m 'alone and not long' tests/integration",
)
"""What pytest is given in `make test`, part by part."""
_SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"


@dataclass(slots=True)
class Seen:
    """What one test did in all runs."""

    outcomes: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Runs:
    """All runs so far. seconds: of each whole run."""

    tests: dict[str, Seen] = field(default_factory=lambda: defaultdict(Seen))
    seconds: list[float] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)
    """Numbers of the runs that pytest ended without a usable report."""

    def add(self, reports: Sequence[Path], seconds: float) -> Counter[str]:
        """Take in the JUnit reports of one run. Returns how many tests had which outcome.

        Raises ElementTree.ParseError or OSError when one is missing, AssertionError when they name
        no test."""
        roots = [ElementTree.parse(report).getroot() for report in reports]
        cases = [case for root in roots for case in root.findall(".//testcase")]
        assert cases, "no test ran"
        found: dict[str, str] = {}
        for case in cases:
            name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            mark = next((m for m in case if m.tag in MARKS), None)
            outcome = "passed" if mark is None else mark.tag
            # A test that passed and failed in its teardown comes twice: the failure counts.
            if found.get(name, "passed") == "passed":
                found[name] = outcome
            seen = self.tests[name]
            seen.seconds.append(float(case.get("time", 0.0)))
            if mark is not None and mark.tag != "skipped":
                seen.messages[(mark.get("message") or "no message").splitlines()[0][:160]] += 1
        for name, outcome in found.items():
            self.tests[name].outcomes[outcome] += 1
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
        slow = sorted(self.tests.items(), key=lambda item: -median(item[1].seconds))[:SLOWEST]
        said += ["slowest, median and longest seconds:"]
        said += [f"  {median(s.seconds):6.1f} {max(s.seconds):6.1f}  {name}" for name, s in slow]
        said += [f"run {number}: pytest ended without a report" for number in self.broken]
        return said

    def steady(self, seen: Seen) -> bool:
        """The same good outcome in every run."""
        (outcome, count), *others = seen.outcomes.most_common()
        good = outcome in ("passed", "skipped") and not others
        return good and count == len(self.seconds)

    @property
    def good(self) -> bool:
        return bool(self.tests) and not self.broken and all(map(self.steady, self.tests.values()))


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
    """Run pytest once for each part; the output is kept only if one failed."""
    log, code = folder / f"run-{number}.log", 0
    reports = reports_of(folder, number, len(parts))
    started = time.monotonic()
    with log.open("wb") as out:
        for report, args in zip(reports, parts, strict=True):
            command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *args]
            done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False)
            code = code or done.returncode
    seconds = time.monotonic() - started
    try:
        counts = runs.add(reports, seconds)
    except (OSError, ElementTree.ParseError, AssertionError):
        runs.broken.append(number)
        counts = Counter()
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    print(f"run {number}: {said or 'no report'} in {seconds:.0f} s (exit {code})", flush=True)
    if code == 0:
        log.unlink()


def kept(folder: Path, parts: int, runs: Runs) -> int:
    """Take in the runs that the folder holds. Returns how many those are.

    Raises SystemExit if they are of other code."""
    folder.mkdir(parents=True, exist_ok=True)
    head = ["git", "describe", "--always", "--abbrev=40", "--dirty"]
    code = subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip()
    mark = folder / "commit"
    if (before := mark.read_text() if mark.exists() else code) != code:
        raise SystemExit(f"{folder} holds runs of {before}, this is {code}: name another directory")
    mark.write_text(code)
    number = 0
    reports = reports_of(folder, 1, parts)
    while all(report.exists() for report in reports):
        number += 1
        suites = [ElementTree.parse(report).getroot().find("testsuite") for report in reports]
        seconds = sum(float(s.get("time", 0)) for s in suites if s is not None)
        counts = runs.add(reports, seconds)
        said = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
        print(f"run {number}: {said} in {seconds:.0f} s (before)", flush=True)
        reports = reports_of(folder, number + 1, parts)
    return number


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
    chosen, rest = parser.parse_known_args(argv)
    if chosen.runs < 1:
        parser.error("--runs must be at least 1")
    parts = [rest] if rest else [shlex.split(part) for part in WHOLE]
    folder = Path(chosen.keep or tempfile.mkdtemp(prefix="pullfill-flaky-"))
    runs = Runs()
    done = kept(folder, len(parts), runs) if chosen.keep else 0
    with busy(chosen.busy), contextlib.suppress(KeyboardInterrupt):
        for number in range(done + 1, chosen.runs + 1):
            run_once(number, folder, parts, runs)
    print("\n".join(runs.lines()))
    print(f"{'steady' if runs.good else 'NOT steady'}; logs of failed runs: {folder}")
    return 0 if runs.good else 1


if __name__ == "__main__":
    os.environ.pop("PYTEST_ADDOPTS", None)
    sys.exit(main())
