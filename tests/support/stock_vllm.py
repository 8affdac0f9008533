"""Stock vLLM servers with NixlConnector, as processes of their own. Needs `make install-nixl`."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support import web
from tests.support.etcd import free_ports
from tests.support.waiting import until
from tests.support.zygote import Forked, zygote

START_S = 120.0
SEQS = 4
"""`--max-num-seqs` of each server."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "NUMBA_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",  # as in our own workers: they run with --enforce-eager
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine has no other process for its model
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass
class StockVllm:
    """One server. `launch` it, then wait until it is `ready`.

    role: `prefill` or `decode`. connector: it has one.
    transfer: another connector's `--kv-transfer-config`. flags, env: more of them."""

    role: str
    model: Path
    log: Path
    connector: bool = True
    transfer: Mapping[str, Any] = field(default_factory=dict)
    flags: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    ports: list[int] = field(default_factory=lambda: free_ports(2))
    process: Forked | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def launch(self) -> None:
        self.log.touch()
        self.process = zygote().spawn(
            self._arguments(), self._environment(), self.log, module=__name__
        )

    def ready(self) -> None:
        """Wait until it answers."""
        until(self._answers, START_S, f"it starts, see {self.log}")

    def _answers(self) -> bool:
        assert self.alive, self.log.read_text()[-3000:]
        with suppress(httpx.HTTPError):
            return web.get(f"{self.url}/health").status_code == 200
        return False

    def terminate(self) -> None:
        """Have the server end, as its user does, and wait for that."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)

    def kill(self) -> None:
        """Kill the server and its engine, which is a child of it, as the end of a machine does."""
        if self.process is None or not self.alive:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.send_signal(signal.SIGKILL)  # if it leads no group yet
        self.process.wait(20)

    def _arguments(self) -> list[str]:
        config = dict(self.transfer) or {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_producer" if self.role == "prefill" else "kv_consumer",
            "kv_buffer_device": "cpu",
        }
        return [
            "--model", str(self.model),
            "--host", "127.0.0.1",
            "--port", str(self.ports[0]),
            "--served-model-name", "m",
            "--dtype", "float32",
            "--enforce-eager",
            "--max-model-len", "2048",
            "--max-num-seqs", str(SEQS),
            "--kv-cache-memory-bytes", str(64 << 20),
            *([f"--kv-transfer-config={json.dumps(config)}"] if self.connector else []),
            *self.flags,
        ]  # fmt: skip

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            **ENVIRONMENT,
            "UCX_TLS": "shm,tcp,self",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.ports[1]),
            **self.env,
        }


@contextmanager
def stock_vllm(
    directory: Path, model: Path, roles: Sequence[str], **how: Any
) -> Iterator[list[StockVllm]]:
    """Servers of these roles, launched. Wait until they are `ready`. how: see `StockVllm`."""
    with ExitStack() as stack:
        found = []
        for number, role in enumerate(roles):
            server = StockVllm(role, model, directory / f"{role}-{number}.log", **how)
            stack.callback(server.kill)
            server.launch()
            found.append(server)
        yield found


def main() -> None:
    """vLLM's own server, with one thing changed: its engine is forked, as vLLM does on GPUs."""
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.v1.engine import utils

    # On CPUs vLLM spawns it, which imports for six seconds what the zygote has already imported.
    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    entry.main()
