"""CPU of a running system, by what its processes are called."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from benchmarks import machine


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
