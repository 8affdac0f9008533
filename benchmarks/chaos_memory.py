"""Memory of the processes that live through a soak, and whether it grows."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import machine
from benchmarks.chaos_rates import Slope, slope
from benchmarks.chaos_tables import none_of
from benchmarks.report import Row, row
from pullfill.engine.heap import EVERY_S

KV = "/dev/shm/pullfill-"


@dataclass(slots=True)
class Samples:
    """Of one process: when, its private memory in MiB, open file descriptors. dead_maps: regions
    of workers that are gone and that it still maps, at the end."""

    at: list[float] = field(default_factory=list)
    private: list[float] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    dead_maps: int = 0

    def last_half(self) -> Slope:
        """Of what is left when a worker has just trimmed its heap: the least in each period of
        that. Between two trims it rises and is used again."""
        half = len(self.at) // 2
        bins = int((self.at[-1] - self.at[half]) / EVERY_S)
        return slope(self.at[half:], self.private[half:], max(3, bins), of=min)


class Sampler:
    """Reads the memory of processes every second, on a thread; a `with` block."""

    def __init__(self, pids: dict[str, int], every_s: float = 1.0) -> None:
        self._pids, self._every_s = pids, every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.of: dict[str, Samples] = {name: Samples() for name in pids}

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def write(self, file: Path) -> None:
        """All samples as CSV: process, seconds, private MiB, open files."""
        lines = ["process,s,private_mib,fds"]
        for name, samples in self.of.items():
            for at, private, fds in zip(samples.at, samples.private, samples.fds, strict=True):
                lines.append(f"{name},{at - samples.at[0]:.0f},{private:.2f},{fds}")
        file.write_text("\n".join([*lines, ""]))

    def look_at_maps(self) -> None:
        """Count what should be unmapped by now."""
        for name, pid in self._pids.items():
            with suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
                self.of[name].dead_maps = sum(m.endswith("(deleted)") and KV in m for m in maps)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            for name, pid in self._pids.items():
                with suppress(OSError):
                    used = machine.memory(pid)
                    fds = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
                    samples = self.of[name]
                    samples.at.append(time.monotonic())
                    samples.private.append((used.rss - used.shared) / 2**20)
                    samples.fds.append(fds)


def memory_rows(name: str, samples: Samples, floor: float) -> list[Row]:
    """Slope of the private memory over the last half, and what was open."""
    found = samples.last_half()
    half = len(samples.at) // 2
    return [
        row(f"{name}: private memory at half time", samples.private[half], "MiB"),
        row(f"{name}: private memory at the end", samples.private[-1], "MiB"),
        Row(
            metric=f"{name}: slope over the last half",
            value=float(f"{found.per_minute:.3g}"),
            unit=f"MiB/min, ± {found.error:.2g}",
            target="within noise",
            ok=found.within_noise(floor),
        ),
        row(f"{name}: open files at half time", samples.fds[half], ""),
        row(f"{name}: open files at the end", samples.fds[-1], ""),
        none_of(f"{name}: mapped regions of dead workers", samples.dead_maps),
    ]
