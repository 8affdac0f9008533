"""A cluster of mock workers on this machine: real NATS and etcd, forked workers, one driver each.

Owner: the `with` block of `plant`. Everything it started is ended at its exit.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.live import BenchError, child, wait_for
from pullfill.deploy import local_servers as binaries
from pullfill.deploy import plan
from pullfill.registry import keys
from pullfill.transfer.shm.files import shm_dir, sweep
from tests.support.zygote import Forked, zygote

FLAGS = [
    "--served-model-name=demo",
    "--dtype=float32",
    "--max-model-len=4096",
    "--max-num-batched-tokens=2048",
    "--max-num-seqs=256",
    "--block-size=16",
    "--enforce-eager",
    "--distributed-executor-backend=pullfill.testing.mock_executor.MockExecutor",
]
MEMBER = "benchmarks.control.member"
KV_BYTES = 8 << 20
"""4096 blocks of the mock's 2 KiB."""
ROUTER = {
    "policy": "always_remote",
    "max_prefill_queue_size": 1_000_000,
    "max_queue_wait_s": 3600,
    "max_remote_kv_fraction": 1.0,
}
START_S = 120.0
BATCH_S = 300.0
AT_ONCE = 16
"""Workers that start at the same time. More of them would starve etcd on a machine of few cores:
workers would lose their leases, and start for minutes."""


def mock_flags(kv_bytes: int = KV_BYTES, **settings: float) -> list[str]:
    """vLLM flags of one worker."""
    return [
        f"--kv-cache-memory-bytes={kv_bytes}",
        f"--additional-config={json.dumps({'mock': settings})}",
    ]


@dataclass(slots=True)
class Use:
    """CPU seconds in a window. ours: without those that `probes` counts as the engine's."""

    total: float = 0.0
    engine: float = 0.0
    threads: dict[str, float] = field(default_factory=dict)
    steps: int = 0

    @property
    def ours(self) -> float:
        return self.total - self.engine


class Driver:
    """The client of a driver process."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        wait_for(lambda: self._connects(path), START_S, "a driver starts", 0.05)
        self._file = self._socket.makefile("rwb")

    def _connects(self, path: Path) -> bool:
        with suppress(OSError):
            self._socket.connect(str(path))
            return True
        return False

    def do(self, what: str, **args: Any) -> dict[str, Any]:
        """Raises BenchError with what went wrong there, and closes the connection then."""
        self._file.write(json.dumps({"do": what, **args}).encode() + b"\n")
        self._file.flush()
        answer: dict[str, Any] = json.loads(self._file.readline() or b'{"error":"it is gone"}')
        if "error" in answer:
            self.close()
            raise BenchError(f"driver: {what}: {answer['error']}")
        return answer

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class Plant:
    """Servers, and what was started beside them."""

    def __init__(self, base: Path, nats: str, etcd: str, pids: dict[str, int]) -> None:
        self.base, self.nats, self.etcd = base, nats, etcd
        self._servers = pids
        self._stats = base / "stats"
        self._stats.mkdir()
        self._members: dict[int, Forked] = {}
        self._serial = 0
        self.model = str(plan.demo_directory())

    def fork(self, role: str, namespace: str, **more: Any) -> int:
        self._serial += 1
        order = {
            "role": role, "namespace": namespace, "nats": self.nats, "etcd": self.etcd,
            "model": self.model, "stats": str(self._stats), **more,
        }  # fmt: skip
        log = self.base / f"{namespace}-{role}-{self._serial}.log"
        member = zygote().spawn([json.dumps(order)], os.environ, log, module=MEMBER)
        self._members[member.pid] = member
        return member.pid

    def end(self, pids: Iterable[int] | None = None) -> None:
        """Kill these at once. None: all that still run.

        A normal end of vLLM runs the garbage collector, which writes to pages that are shared. 32
        workers would need gigabytes and a minute for that."""
        members = [self._members.pop(pid) for pid in list(self._members if pids is None else pids)]
        for member in members:
            member.send_signal(signal.SIGKILL)
        for member in members:
            member.wait()
        sweep(shm_dir())

    def registered(self, namespace: str) -> int:
        """Return how many workers and frontends of a namespace are registered in etcd."""
        prefix = keys.record(namespace, "workers").encode()
        end = prefix[:-1] + bytes([prefix[-1] + 1])
        asked = {"key": _text(prefix), "range_end": _text(end), "count_only": True}
        request = urllib.request.Request(f"{self.etcd}/v3/kv/range", json.dumps(asked).encode())
        with urllib.request.urlopen(request, timeout=30.0) as answer:
            return int(json.load(answer).get("count", 0))

    @property
    def servers(self) -> list[int]:
        """NATS and etcd."""
        return list(self._servers.values())

    def server_cpu(self) -> dict[str, float]:
        return {name: machine.cpu_seconds(pid) for name, pid in self._servers.items()}

    def ask(self, pids: list[int]) -> dict[int, dict[str, Any]]:
        """What the probes of each worker say now."""
        for pid in pids:
            (self._stats / f"{pid}.json").unlink(missing_ok=True)
            os.kill(pid, signal.SIGUSR1)
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + 30.0
        while len(found) < len(pids):
            for pid in pids:
                path = self._stats / f"{pid}.json"
                if pid not in found and path.exists():
                    found[pid] = json.loads(path.read_text())
            if time.monotonic() > deadline:
                raise BenchError("a worker does not tell its CPU")
            time.sleep(0.01)
        return found


class Fleet:
    """n decode and m prefill workers of one namespace, and a driver for them."""

    def __init__(
        self, plant: Plant, namespace: str, decode: int, prefill: int, *,
        decode_flags: list[str], prefill_flags: list[str], router: dict[str, Any],
    ) -> None:  # fmt: skip
        self._plant = plant
        begin = time.monotonic()
        self.decode, self.prefill = list[int](), list[int]()
        orders = [("decode", decode_flags, self.decode)] * decode
        orders += [("prefill", prefill_flags, self.prefill)] * prefill
        for number, (role, flags, pids) in enumerate(orders, 1):
            pids.append(plant.fork(role, namespace, flags=[*FLAGS, *flags]))
            if number % AT_ONCE == 0 or number == len(orders):
                known = partial(self._registered, namespace, number)
                wait_for(known, BATCH_S, f"{number} workers have started", 0.2)
        path = plant.base / f"{namespace}.sock"
        router = {**ROUTER, **router}
        self.front = plant.fork("driver", namespace, socket=str(path), router=router)
        self.driver = Driver(path)
        self.driver.do("wait", decode=decode, within=START_S)
        self.ready_s = time.monotonic() - begin

    def _registered(self, namespace: str, workers: int) -> bool:
        with suppress(OSError):
            return self._plant.registered(namespace) >= workers
        return False

    def close(self) -> None:
        self.driver.close()
        self._plant.end([self.front, *self.decode, *self.prefill])

    @contextmanager
    def window(self) -> Iterator[dict[str, Use]]:
        """CPU by role while open; filled in at its end."""
        used: dict[str, Use] = {}
        before, servers_before = self._look(), self._plant.server_cpu()
        yield used
        after, servers_after = self._look(), self._plant.server_cpu()
        for role, pids in (("decode", self.decode), ("prefill", self.prefill)):
            use = used[role] = Use()
            for pid in pids:
                old, new = before[pid], after[pid]
                use.total += (new["cpu_ns"] - old["cpu_ns"]) / 1e9
                use.engine += (new["engine_ns"] - old["engine_ns"]) / 1e9
                use.steps += new["steps"] - old["steps"]
                for name, ns in new["threads"].items():
                    cpu = (ns - old["threads"].get(name, 0)) / 1e9
                    use.threads[name] = use.threads.get(name, 0.0) + cpu
        used["front"] = Use(
            total=after[self.front]["cpu_ns"] / 1e9 - before[self.front]["cpu_ns"] / 1e9
        )
        for name, cpu in servers_after.items():
            used[name] = Use(total=cpu - servers_before[name])

    def _look(self) -> dict[int, dict[str, Any]]:
        found = self._plant.ask([*self.decode, *self.prefill])
        found[self.front] = {"cpu_ns": machine.cpu_seconds(self.front) * 1e9}
        return found


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def private_bytes(pid: int) -> int:
    """What this process has for itself: not the pages that it still shares with the zygote."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


@contextmanager
def plant(base: Path) -> Iterator[Plant]:
    """Start NATS and etcd under `base`."""
    if not plan.demo_directory().exists():
        raise BenchError("no demo checkpoint: run `make up` once")
    nats_port, etcd_port = binaries.free_port(), binaries.free_port()
    nats, etcd = f"nats://127.0.0.1:{nats_port}", f"http://127.0.0.1:{etcd_port}"
    with ExitStack() as stack:
        first = stack.enter_context(
            child(binaries.nats_command(base / "nats", nats_port), base / "nats.log")
        )
        second = stack.enter_context(
            child(binaries.etcd_command(base / "etcd", etcd_port), base / "etcd.log")
        )
        wait_for(lambda: binaries.nats_ready(nats) is None, 30.0, "NATS answers")
        wait_for(lambda: binaries.etcd_ready(etcd) is None, 30.0, "etcd answers")
        plant = Plant(base, nats, etcd, {"nats": first.pid, "etcd": second.pid})
        stack.callback(plant.end)
        try:
            yield plant
        except BenchError as exc:
            raise BenchError(f"{exc}\n{_ends(base)}") from exc


def _ends(base: Path, files: int = 12, chars: int = 700) -> str:
    """The ends of the processes' logs: those told last first."""
    logs = sorted(base.glob("*.log"), key=lambda path: -path.stat().st_mtime)[:files]
    parts = [(path, chars if number else 10 * chars) for number, path in enumerate(logs)]
    return "\n".join(f"== {path.name}\n{path.read_text()[-limit:]}" for path, limit in parts)
