"""CPU of a running system, by what its processes are called."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks import machine

LOAD = 0.25
"""A machine on which more threads than this want to run at a time is in use."""


@dataclass(frozen=True, slots=True)
class Use:
    """CPU seconds per name in `took_s` of wall clock."""

    took_s: float
    cpu_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        return sum(self.cpu_s.values())

    @property
    def cores(self) -> float:
        """How many cores were kept busy."""
        return self.total_s / self.took_s


class Meter:
    """pids: the roots. A descendant belongs to its nearest root; one that was born since the
    last look counts in full, one that died since then not at all."""

    def __init__(self, pids: Mapping[int, str]) -> None:
        self._pids = dict(pids)
        self._then: dict[int, float] = {}
        self._at = 0.0
        self.start()

    def start(self) -> None:
        """Count from here on."""
        self._then = {pid: cpu for pid, (_, cpu) in self._look().items()}
        self._at = time.monotonic()

    def read(self) -> Use:
        """Since `start`."""
        took = time.monotonic() - self._at
        used = dict.fromkeys(self._pids.values(), 0.0)
        for pid, (name, cpu) in self._look().items():
            used[name] += max(0.0, cpu - self._then.get(pid, 0.0))
        return Use(took, used)

    def _look(self) -> dict[int, tuple[str, float]]:
        found = {}
        for root, name in self._pids.items():
            for pid in self._below(root):
                with suppress(OSError):
                    found[pid] = name, machine.cpu_seconds(pid)
        return found

    def _below(self, root: int) -> list[int]:
        """The root and its descendants that are not below another root."""
        found = [root]
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(root).children():
                if child.pid not in self._pids:
                    found += self._below(child.pid)
        return found


@dataclass(frozen=True, slots=True)
class Calm:
    """How busy a machine was on which nothing of ours ran. others: cores that were used; load:
    how many threads wanted to run at a time, the one that looks not counted.

    The load average would say what ran a minute ago, as the system that was measured before."""

    others: float
    load: float

    @property
    def quiet(self) -> bool:
        return self.others <= machine.QUIET_CORES and self.load <= LOAD

    @classmethod
    def look(cls, looks: int = 25) -> Calm:
        """Takes 40 ms each."""
        wanted = 0
        quiet = machine.OtherLoad()
        with quiet.window([]):
            for _ in range(looks):
                time.sleep(0.04)
                text = Path("/proc/stat").read_text().partition("procs_running ")[2]
                wanted += int(text.split(None, 1)[0]) - 1
        return cls(quiet.others[0], wanted / looks)

    @classmethod
    def wait(cls, within_s: float = 10.0) -> Calm:
        """Until it is quiet, or how it still was at the end."""
        deadline = time.monotonic() + within_s
        while not (found := cls.look()).quiet and time.monotonic() < deadline:
            pass
        return found


@dataclass(frozen=True, slots=True)
class Machine:
    """The whole machine since boot, in seconds: what was stolen by the hypervisor, and all."""

    steal_s: float
    total_s: float

    @classmethod
    def now(cls) -> Machine:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        ticks = [int(f) / 100 for f in fields]
        return cls(ticks[7], sum(ticks))

    def steal_since(self, before: Machine) -> float:
        """Share of the machine's time in between."""
        return (self.steal_s - before.steal_s) / max(1e-9, self.total_s - before.total_s)
