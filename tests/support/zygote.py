"""Workers of a test cluster, forked from one process that has imported vLLM.

A worker needs 13 s of CPU to start, and 10 of them are imports of vLLM and torch. The zygote does
these imports once for a whole test run. Each worker is then a process of its own like any other:
own command line, environment, log, session, threads and memory. Only modules of others are imported
before the fork; pullfill itself reads its environment when it is imported, in the worker.

What was imported is frozen: vLLM collects garbage four times while an engine starts, and would look
at all objects of all modules each time, which takes half of the rest.

What this leaves out: that the imports work, and hash seeds that differ between processes.
tests/integration/test_up_keeps.py starts all processes as a user does.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support.recorder import RECORD
from tests.support.recorder import start as start_recording
from tests.support.waiting import patience

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MS_REC_PRIVATE = 0x4000 | 1 << 18
_OWN_SHM = b"size=1g"
_PRELOADED = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.distributed.kv_transfer.kv_connector.factory",
    "transformers.models.llama.tokenization_llama",
    "vllm.lora.request",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.multiproc_executor",
    "aiohttp.web",
    "blake3",
    "etcd3",
    "etcd3.aio_client",
    "nats",
    "nats.js",
    "numpy.ma",
    "prometheus_client.core",
    "semantic_version",
    "zmq.utils.monitor",
)
ENVIRONMENT = {  # what workers and frontends set for themselves before these imports
    "HF_HUB_OFFLINE": "1",
    "NUMBA_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Else the first question for logprobs compiles for half a minute.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine has no other process for its model
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


class Forked:
    """A worker that the zygote forked: the part of `subprocess.Popen` that tests use."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self._zygote, self.pid = zygote, pid
        self._pidfd = os.pidfd_open(pid)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, -N after signal N, or None while it runs."""
        if self.returncode is None and select.select([self._pidfd], [], [], 0)[0]:
            self._reap()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code once it has ended. Raises subprocess.TimeoutExpired.

        timeout: on an idle machine (`patience`)."""
        if self.returncode is None:
            timeout = timeout and patience(timeout)
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
            self._reap()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """To a worker that has not been waited for."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def _reap(self) -> None:
        self.returncode = self._zygote.ask(reap=self.pid)["code"]
        os.close(self._pidfd)


class Zygote:
    """The process that forks. It ends, with all that it forked, when the process that started it
    does. Processes that this one forks later, as `pytest --forks` does, use the same zygote."""

    def __init__(self) -> None:
        # One order at a time, of all threads of all processes: they share the pipes.
        self._lock = multiprocessing.get_context("fork").Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._pidfd = os.pidfd_open(self._process.pid)  # a forked process cannot wait for it

    @property
    def alive(self) -> bool:
        return not select.select([self._pidfd], [], [], 0)[0]

    def spawn(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        namespace: str = "",
        module: str = "pullfill.deploy.cli",
    ) -> Forked:
        """Start `pullfill ARGUMENTS`; what it prints goes to the end of `log`. namespace: file of
        the network namespace that it enters; it then has a /dev/shm of its own too. module: another
        one, whose `main` runs with these arguments."""
        told = self.ask(
            arguments=list(arguments),
            env=dict(env),
            log=str(log),
            cwd=os.getcwd(),
            namespace=namespace,
            module=module,
        )
        return Forked(self, told["pid"])

    def ask(self, **order: Any) -> dict[str, Any]:
        """One order, one answer. The first waits for the imports."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            print(json.dumps(order), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        assert line, "the process that test workers are forked from has died"
        told: dict[str, Any] = json.loads(line)
        return told


_zygote: Zygote | None = None


def zygote() -> Zygote:
    """The zygote. The first call starts it, and does not wait for it."""
    global _zygote
    if _zygote is None or not _zygote.alive:
        _zygote = Zygote()
    return _zygote


def enter(namespace: str) -> None:
    """Move this thread into a network namespace."""
    with open(namespace) as there:
        _libc("setns", there.fileno(), _CLONE_NEWNET)


def _take_own_shm() -> None:
    """Give this process a /dev/shm of its own."""
    _libc("unshare", _CLONE_NEWNS)
    _libc("mount", b"none", b"/", None, _MS_REC_PRIVATE, None)
    _libc("mount", b"shm", b"/dev/shm", b"tmpfs", 0, _OWN_SHM)


def _libc(function: str, *given: object) -> None:
    """Call a function of libc. Raises OSError if it fails."""
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*given) != 0:
        raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")


def _become_worker(order: dict[str, Any]) -> None:
    """In the child: all that `subprocess.Popen` would have set."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()
    os.chdir(order["cwd"])
    out = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, out), (2, out)):
        os.dup2(source, target)
    if order["namespace"]:
        enter(order["namespace"])
        _take_own_shm()
    os.closerange(3, 256)
    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv[:] = ["pullfill", *order["arguments"]]
    if record := os.environ.get(RECORD):
        start_recording(Path(record), order["arguments"][0])


def _serve() -> str:
    """Fork on demand. Returns in each child the module it is to run, never in the zygote."""
    answers = os.fdopen(os.dup(1), "w")
    orders = os.fdopen(os.dup(0))
    os.dup2(2, 1)  # libraries print
    gc.disable()
    for name in _PRELOADED:
        import_module(name)
    # On CPUs vLLM spawns ranks, and each imports for ten seconds what is imported here. On GPUs it
    # forks them.
    ranks: Any = import_module("vllm.v1.executor.multiproc_executor")
    ranks.get_mp_context = lambda: multiprocessing.get_context("fork")
    gc.enable()
    gc.freeze()
    for line in orders:
        order = json.loads(line)
        if "reap" in order:
            _, status = os.waitpid(order["reap"], 0)
            told = {"code": os.waitstatus_to_exitcode(status)}
        else:
            pid = os.fork()
            if pid == 0:
                _become_worker(order)
                module: str = order["module"]
                return module
            told = {"pid": pid}
        print(json.dumps(told), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    import_module(_serve()).main()
