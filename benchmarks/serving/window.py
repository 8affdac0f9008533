"""One measured window on a running system, and what is kept of it.

The load runs in a process of its own; while it does, this process only waits. CPU is read right
before the first request and right after the last answer.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks import machine
from benchmarks.live import BenchError
from benchmarks.serving import stats
from benchmarks.serving.contract import Answer, Kind, Running
from benchmarks.serving.load import Plan, Result
from benchmarks.serving.meter import Meter, Use
from benchmarks.serving.workloads import Workload

ROOT = Path(__file__).parents[2]


@dataclass(slots=True)
class Window:
    """label: which window of the part, as `longs` or `control`; seconds: in which requests were
    sent (None: until all were answered). others: cores that others used. explained: what the
    frontend says about requests, by id (ours only)."""

    system: str
    part: str
    label: str
    repeat: int
    seconds: float | None
    result: Result
    use: Use
    others: float = 0.0
    explained: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def answers(self) -> list[Answer]:
        return self.result.answers

    @property
    def length_s(self) -> float:
        return self.seconds or self.result.took_s

    @property
    def quiet(self) -> bool:
        return self.others <= machine.QUIET_CORES

    def gaps(self) -> list[float]:
        """Of the short streams."""
        return stats.gaps([a for a in self.answers if a.ask.kind is Kind.SHORT], self.length_s)

    @property
    def cpu_ms_per_request(self) -> float:
        """Of all the system's processes, by everything that was answered."""
        return 1e3 * self.use.total_s / max(1, len(stats.good(self.answers)))


def measure(running: Running, part: str, label: str, repeat: int, workload: Workload) -> Window:
    """Raises BenchError when the load generator itself fails."""
    quiet = machine.OtherLoad()
    with tempfile.TemporaryDirectory(prefix="pullfill-load-") as directory:
        plan, result = Path(directory, "plan"), Path(directory, "result")
        plan.write_bytes(msgspec.json.encode(Plan(running.url, running.model, workload)))
        with _generator(plan, result) as load:
            _expect(load, b"ready")
            meter = Meter(running.pids)
            with quiet.window(running.pids):
                _say(load)
                _expect(load, b"done")
                use = meter.read()
            _say(load)
            if load.wait(60.0):
                raise BenchError(f"the load generator failed: exit status {load.returncode}")
        came = msgspec.json.decode(result.read_bytes(), type=Result)
    return Window(
        running.name,
        part,
        label,
        repeat,
        workload.seconds,
        came,
        use,
        quiet.others[0],
    )


@contextmanager
def _generator(plan: Path, result: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "benchmarks.serving.load", str(plan), str(result)]
    load = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    with load:
        try:
            yield load
        finally:
            load.kill()


def _expect(load: subprocess.Popen[bytes], word: bytes) -> None:
    assert load.stdout is not None
    if load.stdout.readline().strip() != word:
        raise BenchError(f"the load generator did not say {word.decode()!r}")


def _say(load: subprocess.Popen[bytes]) -> None:
    assert load.stdin is not None
    load.stdin.write(b"go\n")
    load.stdin.flush()


def explain(window: Window, url: str) -> None:
    """Ask the frontend about every answer; those it does not know are left out."""
    with httpx.Client(base_url=url, timeout=10.0) as http:
        for answer in window.answers:
            with suppress(httpx.HTTPError, ValueError):
                found = http.get(f"/pullfill/requests/{answer.request_id}").raise_for_status()
                window.explained[answer.request_id] = found.json()
