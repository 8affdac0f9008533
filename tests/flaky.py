"""Repeat tests and count what failed: `make flaky N=10 ARGS="tests/chaos"`.

Without ARGS each run is all tests of `make test`. With --busy, processes that compute all the time
share the cores with the tests. Exit status: 0 if all runs passed. Logs of the others stay.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# What pytest is given in `make test`, part by part.
WHOLE = (
    "--forks 8 tests/unit tests/contract",
    "--forks 3 -m 'not long' benchmarks/tests tests/integration tests/chaos tests/netns tests/gpu",
)
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


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="tests.flaky", allow_abbrev=False)
    parser.add_argument("-n", "--runs", type=int, default=10, help="how often (default 10)")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="N processes compute")
    chosen, rest = parser.parse_known_args()
    parts = [rest] if rest else [shlex.split(part) for part in WHOLE]
    folder, bad, failed = Path(tempfile.mkdtemp(prefix="pullfill-flaky-")), 0, Counter[str]()
    with busy(chosen.busy):
        for number in range(1, chosen.runs + 1):
            log = folder / f"run-{number}.log"
            with log.open("w") as out:
                codes = [
                    subprocess.run(
                        [sys.executable, "-m", "pytest", "-q", *part], stdout=out
                    ).returncode
                    for part in parts
                ]
            text = log.read_text(errors="replace")
            failed.update(re.findall(r"^(?:FAILED|ERROR) \S+", text, re.MULTILINE))
            print(f"run {number}: {text.strip().splitlines()[-1:]} {codes}", flush=True)
            bad += any(codes)
            if not any(codes):
                log.unlink()
    for test, times in failed.most_common():
        print(f"{times} x {test}")
    print(f"{bad} of {chosen.runs} runs failed; logs: {folder}")
    return int(bad > 0)


if __name__ == "__main__":
    os.environ.pop("PYTEST_ADDOPTS", None)
    sys.exit(main())
