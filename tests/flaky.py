"""Repeat tests and list what differed between the runs: `make flaky N=10 ARGS="tests/chaos"`.

Without ARGS each run is all tests of `make test`, without its lint, in a pytest process for each
part. The report names every test that failed in any run, with the first line of each failure, and
every test that had another outcome in another run. With --busy, processes that compute all the time
share the cores with the tests: a machine that others use.

Exit status: 0 if all runs ended with exit code 0 and had the same outcomes. The output of the other
runs stays in the directory that the last line names.
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
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

MARKS = ("failure", "error", "skipped")
WHOLE = (
    "--forks 8 tests/unit tests/contract",
    "-n 2 --dist loadfile --no-loadscope-reorder -m 'not long' "
    "benchmarks/tests tests/integration tests/chaos tests/netns tests/gpu",
)
"""What pytest is given in `make test`, part by part."""
_SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"


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


def outcomes(report: Path) -> dict[str, tuple[str, str]]:
    """(outcome, message) of each test in a JUnit report."""
    found: dict[str, tuple[str, str]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        mark = next((m for m in case if m.tag in MARKS), None)
        # A test that passed and failed in its teardown comes twice: the failure counts.
        if mark is not None:
            message = (mark.get("message") or "no message").splitlines()[0][:160]
            found[name] = mark.tag, message
        else:
            found.setdefault(name, ("passed", ""))
    return found


class Runs:
    """The results of all runs so far: of each run, the outcomes and the seconds."""

    def __init__(self) -> None:
        self.seen: list[dict[str, tuple[str, str]]] = []
        self.seconds: list[float] = []
        self.broken: list[str] = []
        """What went wrong outside of all tests."""

    def once(self, folder: Path, parts: Sequence[Sequence[str]]) -> None:
        """Run pytest once for each part. The output is kept only if one failed."""
        number, began, failed = len(self.seconds) + 1, time.monotonic(), False
        found: dict[str, tuple[str, str]] = {}
        log = folder / f"run-{number}.log"
        with log.open("wb") as out:
            for args in parts:
                report = folder / "report.xml"
                report.unlink(missing_ok=True)
                command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *args]
                code = subprocess.run(command, stdout=out, stderr=out, check=False).returncode
                new = outcomes(report) if report.exists() else {}
                found |= new
                failed |= bool(code)
                bad = any(outcome in ("failure", "error") for outcome, _ in new.values())
                if code not in (0, 1) or (code == 1 and not bad) or not new:
                    self.broken.append(f"run {number}: pytest ended with exit code {code}")
        if not failed:
            log.unlink()
        self.seen.append(found)
        self.seconds.append(time.monotonic() - began)
        counts = Counter(outcome for outcome, _ in found.values())
        said = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
        print(f"run {number}: {said or 'no report'} in {self.seconds[-1]:.0f} s", flush=True)

    def lines(self) -> list[str]:
        """What differed, for people. Empty: nothing did."""
        tests: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for found in self.seen:
            for name, outcome in found.items():
                tests[name].append(outcome)
        said = list(self.broken)
        for name, all_of_it in sorted(tests.items()):
            counts = Counter(outcome for outcome, _ in all_of_it)
            missing = len(self.seen) - len(all_of_it)
            if missing or len(counts) > 1 or not set(counts) <= {"passed", "skipped"}:
                each = ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))
                said.append(f"{name}: {each}" + (f", not run {missing}" if missing else ""))
                messages = Counter(m for kind, m in all_of_it if kind in ("failure", "error"))
                said += [f"    {count} x {message}" for message, count in messages.most_common()]
        return said


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="tests.flaky", description=about, allow_abbrev=False)
    parser.add_argument("-n", "--runs", type=int, default=10, help="how often (default 10)")
    parser.add_argument("--busy", type=int, default=0, metavar="N",
                        help="keep N processes computing meanwhile (default 0)")  # fmt: skip
    chosen, rest = parser.parse_known_args(argv)
    if chosen.runs < 1:
        parser.error("--runs must be at least 1")
    parts = [rest] if rest else [shlex.split(part) for part in WHOLE]
    folder, runs = Path(tempfile.mkdtemp(prefix="pullfill-flaky-")), Runs()
    with busy(chosen.busy), contextlib.suppress(KeyboardInterrupt):
        for _ in range(chosen.runs):
            runs.once(folder, parts)
    done, said = len(runs.seconds), runs.lines()
    if done:
        print(f"{done} runs: median {median(runs.seconds):.0f} s, longest {max(runs.seconds):.0f}")
    steady = done == chosen.runs and not said
    print("\n".join([*said, f"{'steady' if steady else 'NOT steady'}; logs: {folder}"]))
    return 0 if steady else 1


if __name__ == "__main__":
    os.environ.pop("PYTEST_ADDOPTS", None)
    sys.exit(main())
