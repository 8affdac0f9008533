"""A real cluster for tests: nats-server, etcd, and workers as processes of the command line.

What is started here is ended here, by pid. The operating system picks the ports. The test's
namespace keeps it apart from anything else on the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import httpx
import msgspec
import nats
import psutil
import pytest
from nats.js import JetStreamContext
from prometheus_client.parser import text_string_to_metric_families

from pullfill.options import WorkerOptions, declared
from pullfill.registry import keys
from pullfill.runtime.failpoints import parse as check_failpoints
from pullfill.transfer.shm.files import PREFIX, shm_dir, sweep
from pullfill.wire import RouterConfig, WorkerRecord, decode
from tests.support import web
from tests.support.etcd import EtcdServer, free_ports
from tests.support.nats import NatsServer
from tests.support.waiting import patience
from tests.support.waiting import until as until
from tests.support.zygote import ENVIRONMENT, Forked, zygote

if TYPE_CHECKING:
    import openai

T = TypeVar("T")
MODEL = "tiny"
BLOCK = 32  # the CPU attention backend takes multiples of it
FLAGS = (
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=4096",
    "--max-num-batched-tokens=512",
    "--max-num-seqs=16",
    f"--block-size={BLOCK}",
    f"--served-model-name={MODEL}",
)
MOCK = ("--distributed-executor-backend", "pullfill.testing.mock_executor.MockExecutor")
"""Flags of a worker whose engine computes nothing: all else is real."""
LATE_S = 20.0
"""How long tests wait for a worker that did not answer the frontend within one second."""
PATIENT = '{"publish_timeout_s": 3.0}'
"""Queue settings: a test machine may stand still for longer than NATS takes to store a job."""


PULLFILL = (sys.executable, "-c", "from pullfill.deploy.cli import main; main()")


@dataclass
class Worker:
    """One process of the cluster."""

    role: str
    process: subprocess.Popen[bytes] | Forked
    log: Path
    instance_id: str = ""
    armed: str = ""  # its failpoints now

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def stopped(self) -> bool:
        """By SIGSTOP, or a failpoint's."""
        try:
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        except psutil.NoSuchProcess:
            return False  # it has ended

    @property
    def answers(self) -> bool:
        """Whether it can answer: it lives and is not stopped."""
        return self.alive and not self.stopped

    @property
    def router(self) -> RouterConfig:
        """The settings that a decode worker or frontend last said it acts on."""
        said = re.findall(rb"router settings: ({[^}]*})", self.log.read_bytes())
        if not said:
            return RouterConfig()
        # In JSON logs the quotes are escaped.
        return msgspec.json.decode(said[-1].replace(b'\\"', b'"'), type=RouterConfig)

    def kv_digest(self) -> str:
        """Of all bytes of its shared KV memory. Equal before and after an event: it wrote nothing,
        as the memory of an idle engine does not change."""
        with (shm_dir() / f"{PREFIX}{self.instance_id}-0.kv").open("rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()

    def arm(self, spec: str) -> None:
        """Replace its failpoints now. Hits are counted from here."""
        self.armed = spec
        write_failpoints(self.log, spec)

    def hold(self, failpoint: str, cause: Callable[[], object] = lambda: None) -> None:
        """Hold it at its next hit of a failpoint. Returns when it is there. `arm` lets it go.

        cause: called when the failpoint is armed."""
        line = f"failpoint {failpoint} acts: hold".encode()
        before = self.log.read_bytes().count(line)
        self.arm(f"{failpoint}=hold@1")
        cause()
        until(lambda: self.log.read_bytes().count(line) > before, 20, f"held at {failpoint}")

    def signal(self, number: int) -> None:
        if self.alive:
            self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL and reap."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    def ends(self, code: int, within_s: float) -> None:
        """It ends within that time, with this exit code."""
        assert self.wait(within_s) == code

    def stop(self, within_s: float = 30.0) -> int:
        """Send SIGTERM (drain), wait, and return the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(within_s)

    def wait(self, within_s: float) -> int:
        """Wait for its end, and return the exit code. within_s: as of `until`."""
        return self.process.wait(patience(within_s))

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def write_failpoints(log: Path, spec: str) -> Path:
    """Replace the file from which a worker with this log takes its failpoints."""
    check_failpoints(spec)
    path = log.with_suffix(".failpoints")
    new = path.with_suffix(".new")
    new.write_text(spec)
    return new.replace(path)


STOCK = frozenset(os.environ.get("STOCK", "").split())
"""Roles whose workers are stock `vllm serve` with one flag: STOCK="decode prefill" pytest …"""


@dataclass
class StockWorker(Worker):
    """A server of stock vLLM and the engine's process. With our connector that is a worker."""

    engine: int = 0  # its pid, once it is known
    port: int = 0  # of the server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self.engine or self.process.pid

    @property
    def alive(self) -> bool:
        if self.process.poll() is not None:
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            return bool(psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE)
        return False

    @property
    def serves(self) -> bool:
        """Whether its server is up, too. Until then SIGTERM ends it at once."""
        with contextlib.suppress(httpx.HTTPError):
            return web.get(f"{self.url}/health").status_code == 200
        return False

    def ready(self) -> None:
        """Wait until its server is up."""

        def up() -> bool:
            assert self.alive, self.tail()
            return self.serves

        until(up, 120.0, f"it starts, see {self.log}")

    def counter(self, name: str) -> float:
        """Sum of a metric of vLLM's server."""
        text = web.get(f"{self.url}/metrics").text
        samples = (s for family in text_string_to_metric_families(text) for s in family.samples)
        return sum(sample.value for sample in samples if sample.name == name)

    def ends(self, code: int, within_s: float) -> None:
        if "lease revoked" in self.log.read_text():
            self.signal(signal.SIGTERM)  # it serves alone until it is told to end
        # vLLM's server looks every 5 s whether its engine lives, and has codes of its own.
        self.wait(within_s + 5)

    def signal(self, number: int) -> None:
        if number == signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            self.process.send_signal(number)  # if it leads no group yet
        elif number == signal.SIGTERM:
            self.process.send_signal(number)
        elif self.alive:
            os.kill(self.pid, number)


def stock_arguments(role: str, name: str, port: int, flags: Sequence[str]) -> list[str]:
    """Return vLLM's arguments for a worker that `pullfill ROLE FLAGS` would be.

    Skips the test if it needs a flag that is no setting of such a worker."""
    from pullfill.worker.stock_core import settings as settings_for

    known = {one.name.partition("/")[0] for one in declared(WorkerOptions)}
    able = settings_for(role)
    places = {"--etcd", "--nats", "--namespace", "--state-dir", "--security"}
    settings: dict[str, str] = {}
    rest: list[str] = []
    drain_s = 20.0
    words = iter(flags)
    for word in words:
        flag, _, value = word.partition("=")
        if flag in ("--model", "--cpu"):
            rest += [flag, next(words)] if flag == "--model" else []
        elif (key := flag.strip("-").replace("-", "_")) in able or flag in places:
            on = key in able and able[key].type is bool
            settings[key] = value or ("true" if on else next(words))
        elif flag == "--drain-timeout":
            drain_s = float(value)
        elif flag in known:
            pytest.skip(f"a worker in stock vLLM has no {flag}")
        else:
            rest.append(word)
    transfer = {
        "kv_connector": f"Pullfill{role.title()}",
        "kv_connector_module_path": "pullfill.worker.stock_core",
        "kv_role": {"decode": "kv_consumer", "prefill": "kv_producer"}[role],
        "engine_id": name.removeprefix(f"{role}-"),
        "kv_connector_extra_config": settings,
    }
    return [
        *rest, "--host=127.0.0.1", f"--port={port}", f"--shutdown-timeout={math.ceil(drain_s)}",
        f"--kv-transfer-config={json.dumps(transfer)}",
        # Our own workers add it on a CPU: docs/decisions.md, 13.
        "--worker-cls=pullfill.engine.cpu_worker.SeededCPUWorker",
    ]  # fmt: skip


@contextlib.contextmanager
def stock_vllm(
    directory: Path,
    model: Path,
    roles: Sequence[str] = ("decode",),
    *,
    connector: bool = True,
    transfer: Mapping[str, Any] | None = None,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[list[StockWorker]]:
    """Stock vLLM servers of these roles, launched. Wait until they are `ready`.

    connector: they have one. Without `transfer` it is NixlConnector, which needs
    `make install-nixl`.
    transfer: another `--kv-transfer-config`."""
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        found = []
        for number, role in enumerate(roles):
            port, side_port = free_ports(2)
            config = transfer or {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
                "kv_buffer_device": "cpu",
            }
            arguments = [
                "--model", str(model),
                "--host", "127.0.0.1",
                "--port", str(port),
                "--served-model-name", "m",
                "--dtype", "float32",
                "--enforce-eager",
                "--max-model-len", "2048",
                "--max-num-seqs", "4",
                "--kv-cache-memory-bytes", str(64 << 20),
                *([f"--kv-transfer-config={json.dumps(config)}"] if connector else []),
                *flags,
            ]  # fmt: skip
            full = {
                **os.environ, **ENVIRONMENT, "UCX_TLS": "shm,tcp,self",
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port), **(env or {}),
            }  # fmt: skip
            log = directory / f"{role}-{number}.log"
            log.touch()
            made = zygote().spawn(arguments, full, log, module="tests.support.stock_vllm")
            found.append(StockWorker(role, made, log, port=port))
            stack.callback(found[-1].kill)
        yield found


@dataclass
class Cluster:
    """See the module.

    kv_mib: KV memory of each worker, which sets how many blocks there are.
    api_key: what our requests to frontends show.
    forked: workers start from the zygote, each with 1 s of CPU. Otherwise they start as a user
    starts them, which takes 13 s."""

    directory: Path
    model_path: Path
    kv_mib: int = 64
    lease_ttl_s: int = 5
    namespace: str = "test"
    api_key: str = "none"
    forked: bool = True
    workers: list[Worker] = field(default_factory=list)
    stock: frozenset[str] = STOCK
    up_states: ClassVar[tuple[str, ...]] = ("ready",)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.etcd = EtcdServer(self.directory / "etcd")
        self.nats = NatsServer(self.directory / "nats")
        self.frontend_url = ""
        # Tests of other things count on which worker has its turn.
        self._router: dict[str, object] = {"decode_policy": "round_robin"}
        self._clients: dict[str, openai.OpenAI] = {}
        if self.forked:
            zygote()  # it imports while the servers start

    # ------------------------------------------------------------------ life

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, *processes: str | Sequence[str], **router: object) -> Self:
        """Start the servers, then all processes at once. Returns when requests can be sent.

        processes: the role of each, or its role and flags. Default: one of each role.
        router: settings that then act."""
        self.start_servers()
        for process in processes or ("decode", "prefill", "frontend"):
            role, *flags = (process,) if isinstance(process, str) else process
            self.launch(role, *flags)
        self.wait_ready(*self.workers)
        if router:
            self.set_router(**router)
        return self

    def start_servers(self) -> None:
        self.etcd.start()
        self.nats.start()
        self.etcd.ctl("put", keys.record(self.namespace, "config", "queue"), PATIENT)
        router = msgspec.json.encode(self._router).decode()
        self.etcd.ctl("put", keys.record(self.namespace, "config", "router"), router)

    def launch(
        self,
        role: str,
        *extra: str,
        env: Mapping[str, str] | None = None,
        failpoints: str = "",
        nats: str = "",
        namespace: str = "",
        address: str = "127.0.0.1",
        program: Sequence[str] = (),
    ) -> Worker:
        """Start one process; does not wait. nats: another address of the server, as through a
        proxy. namespace: the network namespace it runs in (`Zygote.spawn`). address: where a
        frontend answers. program: the `pullfill` command of another build."""
        number = sum(w.role == role for w in self.workers)
        log = self.directory / f"{role}-{number}.log"
        command = [
            role,
            "--model", str(self.model_path),
            "--etcd", self.etcd.url,
            "--nats", nats or self.nats.url,
            "--namespace", self.namespace,
            "--lease-ttl", str(self.lease_ttl_s),
            *FLAGS,
        ]  # fmt: skip
        if role == "frontend":
            (port,) = free_ports(1)
            command += ["--port", str(port), "--enable-auto-tool-choice"]
            command += ["--tool-call-parser", "hermes"]
            # Its routes for development: tests empty prefix caches through them.
            env = {"VLLM_SERVER_DEV_MODE": "1", **(env or {})}
            self.frontend_url = f"http://{address}:{port}"
        else:
            cpu = (number + (role == "prefill")) % (os.cpu_count() or 1)
            command += [f"--kv-cache-memory-bytes={self.kv_mib << 20}", f"--cpu={cpu}"]
        full = {**os.environ, "PULLFILL_LOG_LEVEL": "INFO", **(env or {})}
        full["PULLFILL_FAILPOINTS"] = f"@{write_failpoints(log, failpoints)}"
        command += extra
        log.touch()
        if role in self.stock and not program:
            name, (port,) = f"{role}-s{number}-{secrets.token_hex(3)}", free_ports(1)
            made = zygote().spawn(
                stock_arguments(role, name, port, command[1:]), {**full, **ENVIRONMENT}, log,
                namespace, module="tests.support.stock_vllm",
            )  # fmt: skip
            worker: Worker = StockWorker(role, made, log, name, armed=failpoints, port=port)
        elif self.forked and not program:
            forked = zygote().spawn(command, full, log, namespace)
            worker = Worker(role, forked, log, armed=failpoints)
        else:
            assert not namespace, "only forked workers enter a namespace"
            with log.open("ab") as out:
                process = subprocess.Popen(
                    [*(program or PULLFILL), *command],
                    env=full,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            worker = Worker(role, process, log, armed=failpoints)
        self.workers.append(worker)
        return worker

    def add(self, role: str, *flags: str) -> Worker:
        """Start one more process. Returns it when it is ready."""
        worker = self.launch(role, *flags)
        self.wait_ready(worker)
        return worker

    def wait_ready(self, *workers: Worker, within_s: float = 180.0) -> None:
        """Until each is seen ready by the frontend, and prefill workers by every decode worker."""
        until(lambda: self.seen(workers), within_s, f"ready: {[w.role for w in workers]}")
        until(self.linked, 20.0, "every prefill worker connected to every decode worker")
        # One that came before any decode worker was `ready` until it met the first.
        until(lambda: self.seen(workers), 20.0, f"ready again: {[w.role for w in workers]}")

    def seen(self, workers: Sequence[Worker]) -> bool:
        """Whether the frontend sees each of them ready; notes their instance ids."""
        for worker in workers:
            assert worker.alive, f"{worker.role} died at start:\n{worker.tail()}"
        with contextlib.suppress(httpx.HTTPError):
            rows = self.status()["workers"]
            for worker in workers:
                if isinstance(worker, StockWorker):
                    mine = (w["pid"] for w in rows if w["instance_id"] == worker.instance_id)
                    worker.engine = next(mine, 0)
            known = {w["pid"]: w for w in rows}
            for worker in workers:
                sides = [w["role"] for w in rows if w["pid"] == worker.pid]
                if worker.role == "worker" and len(sides) < 2:
                    return False
                if worker.role == "frontend":
                    ready = web.get(f"{self.frontend_url}/ready").json()
                    decodes = [w for w in workers if w.role in ("decode", "worker")]
                    if ready.get("decode", 0) < len(decodes):
                        return False
                elif not self._up(known.get(worker.pid, {})):
                    return False
                elif isinstance(worker, StockWorker) and not worker.serves:
                    return False
                else:
                    worker.instance_id = known[worker.pid]["instance_id"]
            return True
        return False

    def _up(self, row: dict[str, Any]) -> bool:
        """Whether a worker is ready, by its row of the status. A decode worker must also be
        connected to the frontend: then the row holds the load that its welcome message brought."""
        connected = row.get("routing", {}).get("load", {}) is not None
        return row.get("state") in self.up_states and connected

    def linked(self) -> bool:
        """Whether every prefill worker is connected to every decode worker but itself, and compared
        with it: the job of a self-check would come in the way of a test, and meet its failpoints.
        """
        entries = self.status()["workers"]
        prefill = {w["instance_id"] for w in entries if w["role"] == "prefill"}
        decode = [w for w in entries if w["role"] == "decode"]
        return all(
            prefill <= {w["instance_id"], *w["load"].get("prefill_workers", ())}
            and all(check.get("result") != "pending" for check in w["load"].get("self_checks", ()))
            for w in decode
        )

    def stop(self) -> None:
        """End everything, whatever state it is in."""
        for client in self._clients.values():
            client.close()
        for worker in self.workers:
            if worker.alive:
                worker.signal(signal.SIGCONT)
                worker.kill()
        self.nats.stop()
        self.etcd.stop()
        sweep(shm_dir())  # of what was killed, whether or not we learnt its name

    # ------------------------------------------------------------------ looking

    def of(self, role: str) -> list[Worker]:
        """Living workers of a role, oldest first."""
        return [w for w in self.workers if w.role == role and w.alive]

    def client(self) -> openai.OpenAI:
        """One client for each frontend. It is closed with the cluster."""
        import openai

        url = f"{self.frontend_url}/v1"
        if url not in self._clients:
            options: dict[str, Any] = {"timeout": 60.0, "max_retries": 0}
            self._clients[url] = openai.OpenAI(base_url=url, api_key=self.api_key, **options)
        return self._clients[url]

    def status(self) -> dict[str, Any]:
        """What the frontend knows now. A worker that did not answer in time has no load there."""
        return self._get("/pullfill/status")

    def full_status(self, *workers: Worker) -> dict[str, Any]:
        """`status` with the load of every worker, or of these. Waits for late ones."""
        give_up = time.monotonic() + patience(LATE_S)
        while True:
            status = self.status()
            told = {w["pid"] for w in status["workers"] if w["load"]}
            late = [w for w in workers or self._answering() if w.pid not in told]
            if not any(w.answers for w in late) or time.monotonic() > give_up:
                return status
            time.sleep(0.05)

    def _answering(self) -> list[Worker]:
        """Workers that must be in the frontend's answers."""
        return [w for w in self.workers if w.instance_id and w.answers]

    def _get(self, path: str) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.api_key}"}
        answer = web.get(f"{self.frontend_url}{path}", headers=headers)
        result: dict[str, Any] = answer.raise_for_status().json()
        return result

    def load_of(self, worker: Worker) -> dict[str, Any]:
        """What a worker reports of itself. Waits for one that is late."""
        rows = self.full_status(worker)["workers"]
        return next((row["load"] for row in rows if row["pid"] == worker.pid), {})

    def records(self, role: str) -> dict[str, WorkerRecord]:
        """What etcd holds now, by instance id."""
        prefix = keys.record(self.namespace, "workers", f"{role}/")
        answer = msgspec.json.decode(self.etcd.ctl("get", "--prefix", prefix, "-w", "json"))
        found = [decode(b64decode(kv["value"]), WorkerRecord) for kv in answer.get("kvs", [])]
        return {record.instance_id: record for record in found}

    def incarnations(self) -> set[str]:
        """Of all decode and prefill workers that are registered now."""
        found = [*self.records("decode").values(), *self.records("prefill").values()]
        return {record.incarnation for record in found}

    def stock_flag(self, **extra: object) -> dict[str, Any]:
        """The `--kv-transfer-config` of a decode worker in stock vLLM. extra: more settings."""
        place = {"etcd": self.etcd.url, "nats": self.nats.url, "namespace": self.namespace}
        return {
            "kv_connector": "PullfillDecode",
            "kv_connector_module_path": "pullfill.worker.stock_core",
            "kv_role": "kv_consumer",
            "kv_connector_extra_config": place | extra,
        }

    def revoke_lease(self, worker: Worker) -> None:
        """As `pullfill drain` does."""
        key = keys.worker(self.namespace, worker.role, worker.instance_id)
        fields = self.etcd.ctl("get", key, "-w", "fields").splitlines()
        lease = int(next(x for x in fields if x.startswith('"Lease"')).split(":")[1])
        self.etcd.ctl("lease", "revoke", f"{lease:x}")

    def explain(self, request_id: str) -> dict[str, Any]:
        return self._get(f"/pullfill/requests/{request_id}")

    def counter(self, name: str, **labels: str) -> float:
        """Sum of a metric over the cluster, from the frontend's one scrape. What vLLM counts in its
        steps only the servers of stock workers tell, without labels of ours."""
        stock = [w for w in self._answering() if isinstance(w, StockWorker)]
        if labels or not name.startswith("vllm:spec_decode_"):
            stock = []
        told = sum(v for key, v in self.samples(name).items() if labels.items() <= set(key))
        return told + sum(w.counter(name) for w in stock)

    def samples(self, *names: str) -> dict[tuple[tuple[str, str], ...], float]:
        """All samples of these metrics by their labels, in order, `__name__` first. Waits for the
        metrics of every worker that lives."""
        give_up = time.monotonic() + patience(LATE_S)
        while True:
            text = web.get(f"{self.frontend_url}/metrics").text
            late = [w for w in self._answering() if f'instance_id="{w.instance_id}"' not in text]
            late = [w for w in late if w.answers]
            if not late:
                break
            # Without them a counter would look as if it had not moved.
            assert time.monotonic() < give_up, f"no metrics of {[w.instance_id for w in late]}"
            time.sleep(0.05)
        # To read all lines takes 30 ms, and many tests wait for a metric.
        lines = [line for line in text.splitlines() if line.startswith(names)]
        return {
            (("__name__", sample.name), *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families("\n".join(lines) + "\n")
            for sample in family.samples
            if sample.name in names
        }

    def jetstream(self, work: Callable[[JetStreamContext, str], Awaitable[T]]) -> T:
        """Run `work` over a connection of its own, with the name of the stream of jobs."""

        async def run() -> T:
            client = await nats.connect(self.nats.url)
            try:
                context = client.jetstream()
                names = [str(info.config.name) for info in await context.streams_info()]
                (jobs,) = [name for name in names if not name.endswith("-dead")]
                return await work(context, jobs)
            finally:
                await client.close()

        return asyncio.run(run())

    def set_router(self, **settings: object) -> None:
        """Store router settings where `pullfill config set` does and wait until every decode worker
        and frontend says that they act."""
        self._router |= settings
        wanted = msgspec.convert(self._router, RouterConfig)
        key = keys.record(self.namespace, "config", "router")
        value = msgspec.json.encode(self._router).decode()
        if self.etcd.ctl("get", key, "--print-value-only").strip() != value:
            self.etcd.ctl("put", key, value)
        deciding = [w for w in self.of("decode") if w.instance_id and not w.stopped]
        deciding += [w for w in self.of("frontend") if not w.stopped]
        until(lambda: all(w.router == wanted or not w.alive for w in deciding), 20, "settings act")

    def assert_clean(self) -> None:
        """Ledger, quarantine, queue and free blocks are back to the baseline (I3, I4)."""
        with contextlib.suppress(AssertionError):
            until(lambda: not self._left(), 20, "clean")
        left = self._left()
        assert not left, f"left behind: {left}"

    def _left(self) -> list[str]:
        """What is not as in a cluster without requests."""
        status = self.status()
        if status["queue"] is None:
            return ["the queue is unknown"]
        found = []
        for key in ("depth_jobs", "in_flight", "depth_tokens"):
            if status["queue"][key]:
                found.append(f"queue {key}={status['queue'][key]}")
        living = {w.pid for w in self._answering()}
        for worker in status["workers"]:
            name, load = worker["instance_id"], worker["load"]
            if worker["state"] == "lost":
                if worker["pid"] in living:  # it may hold anything
                    found.append(f"{name} does not answer")
                continue
            for key in (
                "open_jobs", "quarantined_blocks", "read_leases", "requests", "jobs", "running"
            ):  # fmt: skip
                if load.get(key):
                    found.append(f"{name} {key}={load[key]}")
            if (blocks := load.get("kv_blocks")) and load["kv_free_blocks"] != blocks:
                found.append(f"{name} free blocks {load['kv_free_blocks']} of {blocks}")
        return found

    def log_errors(self) -> list[str]:
        """Lines of the workers' logs that tell of an error nobody expected."""
        bad = re.compile(r"Traceback|AssertionError| E \w+ pullfill")
        return [
            f"{w.log.name}: {line}"
            for w in self.workers
            for line in w.log.read_text(errors="replace").splitlines()
            # Stock vLLM's server has a traceback for the end of its engine, also for a test's.
            if bad.search(line) and not line.startswith("(APIServer")
        ]


def command(cluster: Cluster, *words: str) -> list[str]:
    """Return the arguments of `pullfill WORDS` for this cluster."""
    where = ("--etcd", cluster.etcd.url, "--nats", cluster.nats.url)
    return [*PULLFILL, *words, *where, "--namespace", cluster.namespace]


def pullfill(cluster: Cluster, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `pullfill WORDS`. Its lines are not wrapped. env: more variables."""
    return subprocess.run(
        command(cluster, *words),
        capture_output=True,
        text=True,
        timeout=patience(60.0),
        env={**os.environ, "COLUMNS": "400", **env},
    )
