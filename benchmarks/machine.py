"""CPU time and memory of processes, and whether somebody else uses the machine (Linux only).

CPU time comes from each process's own CPU clock, in nanoseconds, because /proc/PID/stat counts in
hundredths of a second: a frontend spends that on hundreds of tokens.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

QUIET_CORES = 0.15
"""Others may use this much of one core in a measured window; kernel threads alone use some."""


def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16.

    Without them PyTorch multiplies it much slower than float32, and no engine keeps up."""
    return any(flag.endswith("bf16") for flag in Path("/proc/cpuinfo").read_text().split())


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process since it began. Raises OSError when it is gone."""
    # MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED) of the kernel: what clock_getcpuclockid(3) gives.
    return time.clock_gettime((~pid << 3) | 2)


def tree(pids: Iterable[int]) -> list[int]:
    """The processes and all that descend from them."""
    found: dict[int, None] = {}
    for pid in pids:
        found[pid] = None
        with suppress(psutil.NoSuchProcess):
            found.update({c.pid: None for c in psutil.Process(pid).children(recursive=True)})
    return list(found)


def total_cpu_seconds(pids: Iterable[int]) -> float:
    """Sum over the processes and their children; those that are gone count nothing."""
    total = 0.0
    for pid in tree(pids):
        with suppress(OSError):
            total += cpu_seconds(pid)
    return total


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one process. rss: resident now; shared: of it pages of shared memory, which every
    process that maps them counts again."""

    rss: int
    shared: int


def memory(pid: int) -> Memory:
    """Raises OSError when the process is gone."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
    if "VmRSS" not in kib:  # it has ended and nobody asked how
        raise ProcessLookupError(f"process {pid} has ended")
    return Memory(kib["VmRSS"] << 10, kib["RssShmem"] << 10)


@dataclass(slots=True)
class ThreadUse:
    """What one thread did in a window. wakes: how often it went to sleep and came back; waited_s:
    how long it could have run and had no core."""

    process: str
    thread: str
    cpu_s: float
    wakes: int
    waited_s: float = 0.0


def thread_use(names: dict[int, str], seconds: float) -> list[ThreadUse]:
    """Watch every thread of the processes (pid → name) for so long; the busiest first."""
    before = {key: value for pid in names for key, value in _threads(pid).items()}
    time.sleep(seconds)
    uses = []
    for pid, name in names.items():
        for key, (comm, cpu, wakes, waited) in _threads(pid).items():
            _, old_cpu, old_wakes, old_waited = before.get(key, (comm, 0.0, 0, 0.0))
            use = ThreadUse(name, f"{comm}/{key[1]}", cpu - old_cpu, wakes - old_wakes)
            use.waited_s = waited - old_waited
            uses.append(use)
    return sorted(uses, key=lambda use: -use.cpu_s)


def _threads(pid: int) -> dict[tuple[int, int], tuple[str, float, int, float]]:
    found = {}
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                status = (task / "status").read_text()
                wakes = status.partition("\nvoluntary_ctxt_switches:")[2].split()[0]
                cpu, waited = (int(ns) / 1e9 for ns in (task / "schedstat").read_text().split()[:2])
                comm = (task / "comm").read_text().strip()
                found[pid, int(task.name)] = comm, cpu, int(wakes), waited
    return found


class OtherLoad:
    """Collects, over the measured windows, how much CPU others used."""

    def __init__(self) -> None:
        self.others: list[float] = []

    def look(self, seconds: float = 3.0) -> None:
        """A window in which nothing of ours should run."""
        with self.window([]):
            time.sleep(seconds)

    @contextmanager
    def window(self, ours: Iterable[int]) -> Iterator[None]:
        """Measure while open. `ours`: processes whose use is expected, with their children; this
        process is one of them."""
        mine = [os.getpid(), *ours]
        # Both reads back to back: what runs between them is counted as somebody else's.
        busy, own, begin = _busy_seconds(), total_cpu_seconds(mine) + _ended(), time.monotonic()
        yield
        took = time.monotonic() - begin
        other = (_busy_seconds() - busy) - (total_cpu_seconds(mine) + _ended() - own)
        self.others.append(max(0.0, other) / took)

    @property
    def quiet(self) -> bool:
        return max(self.others, default=0.0) <= QUIET_CORES

    def __str__(self) -> str:
        shares = ", ".join(f"{100 * share:.0f} %" for share in self.others)
        return f"others used of one core, per window: {shares}"


def _ended() -> float:
    """Return the CPU seconds of our children that have ended and were waited for."""
    use = resource.getrusage(resource.RUSAGE_CHILDREN)
    return use.ru_utime + use.ru_stime


def _busy_seconds() -> float:
    """All CPU time of the machine that was not idle, time stolen by the hypervisor included."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
