"""Plain vLLM API servers on given cores, as the benchmarks start them.

Owner: the `with` block of `starting` or `api_server`. Its exit ends the server and the processes it
started.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks import machine
from benchmarks.live import BenchError, child, wait_for
from pullfill.deploy.local_servers import free_port
from tests.support import web

ENTRY = "vllm.entrypoints.launchers.api_server.entry"
START_LIMIT_S = 240.0
END_S = 8.0
"""How long a server that is told to end may take; requests still open make vLLM wait."""

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment of every server. Nothing in it decides how fast it is."""


@dataclass(frozen=True, slots=True)
class Cores:
    """Where a server runs. engine: the processes with engine core and model, one thread of compute
    for each core; api: the HTTP process."""

    engine: tuple[int, ...]
    api: tuple[int, ...]

    @property
    def all(self) -> set[int]:
        return {*self.engine, *self.api}


@dataclass(frozen=True, slots=True)
class ApiServer:
    """A server that answers. pid: of its HTTP process; the engine's processes descend from it."""

    name: str
    url: str
    pid: int

    def engine(self) -> int:
        """The process with the model in it: by far the largest. Raises BenchError without one."""
        children = psutil.Process(self.pid).children(recursive=True)
        sized = sorted((machine.memory(c.pid).rss, c.pid) for c in children)
        if not sized or sized[-1][0] < 200 << 20:
            raise BenchError(f"{self.name} has no engine process beside it")
        return int(sized[-1][1])


def environment(engine: Sequence[int]) -> dict[str, str]:
    """What a vLLM server needs to use these cores well, and nothing from a network.

    By itself vLLM runs the worker in a process beside the engine core, and each waits for the other
    in a busy loop, which costs much on two cores (measured as `aggregated-stock`). In one process
    they do not, but vLLM no longer sets the threads of compute up: one for each core. By itself it
    would keep one of two cores free, too.
    """
    return {
        **QUIET,
        "OMP_NUM_THREADS": str(len(engine)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


@dataclass(frozen=True, slots=True)
class Starting:
    """A server that was just started, on its cores."""

    name: str
    url: str
    log: Path
    cores: Cores
    process: subprocess.Popen[bytes]

    def ready(self) -> ApiServer:
        """Wait until it is healthy, then pin its processes. Raises BenchError."""
        wait_for(self._up, START_LIMIT_S, f"{self.name} answers (see {self.log})", 0.2)
        server = ApiServer(self.name, self.url, self.process.pid)
        pin_server(server, self.cores)
        return server

    def _up(self) -> bool:
        if self.process.poll() is not None:
            raise BenchError(f"{self.name} ended:\n{self.log.read_text()[-3000:]}")
        return web.get(f"{self.url}/health", timeout=5.0).status_code == 200


@contextmanager
def starting(
    name: str,
    model: Path,
    logs: Path,
    flags: Sequence[str],
    cores: Cores,
    env: Mapping[str, str] | None = None,
) -> Iterator[Starting]:
    """A server of the model on a free port, which is not up yet. Its output is in `NAME.log`.

    env: instead of `environment(cores.engine)`.
    """
    port = free_port()
    command = [sys.executable, "-P", "-m", ENTRY, "--model", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), *flags]
    log = logs / f"{name}.log"
    told = environment(cores.engine) if env is None else dict(env)
    with child(command, log, told, END_S) as process:
        # From the first moment: vLLM counts the cores it may use.
        psutil.Process(process.pid).cpu_affinity(sorted(cores.all))
        yield Starting(name, f"http://127.0.0.1:{port}", log, cores, process)


@contextmanager
def api_server(
    name: str,
    model: Path,
    logs: Path,
    flags: Sequence[str],
    cores: Cores,
    env: Mapping[str, str] | None = None,
) -> Iterator[ApiServer]:
    """A server that says it is healthy, its processes pinned. Raises BenchError."""
    with starting(name, model, logs, flags, cores, env) as started:
        yield started.ready()


def pin_server(server: ApiServer, cores: Cores) -> None:
    """Put all threads of the server on their cores, but those that are bound within already."""
    pin([server.pid], cores.api)
    engine = machine.tree([server.pid])
    engine.remove(server.pid)
    pin(engine, cores.engine)


def pin(pids: Iterable[int], cores: Iterable[int]) -> None:
    """Every thread of the processes that may run elsewhere is put on these cores."""
    wanted = set(cores)
    for pid in pids:
        for thread in threads(pid):
            with suppress(ProcessLookupError):
                if not os.sched_getaffinity(thread) <= wanted:
                    os.sched_setaffinity(thread, wanted)


def threads(pid: int) -> list[int]:
    """Thread ids of a process; none when it is gone."""
    with suppress(OSError):
        return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    return []
