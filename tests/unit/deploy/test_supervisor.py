"""How `up` starts a cluster: in what order, what it waits for, and what it records.

Its processes are `sleep`. NATS is away, and `_Registry` stands for etcd.
"""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from rich.console import Console

from pullfill import wire
from pullfill.deploy import local_servers, members, plan, supervisor
from pullfill.deploy.state import StateDir, identity, is_alive, tagged
from pullfill.deploy.supervisor import Interrupted, Supervisor
from pullfill.deploy.view import ProcessView
from pullfill.errors import RegistryUnavailable
from pullfill.net.security import Security, ServerSecurity
from pullfill.options import ForwarderName, FrontendOptions
from pullfill.registry.client import EtcdClient, KeyValue
from tests.support.http_stub import serving
from tests.support.waiting import eventually
from tests.support.workers import record

PENDING = {"result": "pending"}
PASSED = {"result": "passed"}


class _Registry:
    """Stands for etcd.

    ready_at: at which look a process that runs is ready.
    http: where workers answer /status.
    away: whether etcd does not answer.
    logins: what each client has shown.
    """

    def __init__(self, state: StateDir) -> None:
        self._state = state
        self._looks: Counter[str] = Counter()
        self.http = ""
        self.ready_at = 2
        self.away = False
        self.logins: list[ServerSecurity] = []

    async def connect(self, *_: object, security: ServerSecurity, **__: object) -> Self:
        self.logins.append(security)
        return self

    async def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        if self.away:
            raise RegistryUnavailable("etcd is away")
        self._looks.update(str(entry.instance_id) for entry in self._state.live())
        ready = [
            record(n, http=self.http) for n, looks in self._looks.items() if looks >= self.ready_at
        ]
        keys = [f"{prefix}{r.role}/{r.instance_id}".encode() for r in ready]
        return [KeyValue(key, wire.encode(r)) for key, r in zip(keys, ready, strict=True)], 1

    async def close(self) -> None:
        """Nothing was opened."""


class Rig:
    """One `up` of such processes, and what it prints."""

    def __init__(self, directory: Path) -> None:
        self.state = StateDir(directory)
        self.registry = _Registry(self.state)
        self.specs: list[plan.ProcessSpec] = []
        self.printed = io.StringIO()
        self.load: dict[str, Any] = {}
        self.self_checks_s = 600.0

    def add(self, name: str, after: str = "") -> None:
        role, sleep = name.split("-")[0], ["sleep", "60"]
        self.specs.append(
            plan.ProcessSpec(
                name=name, role=role, argv=sleep, env={}, instance_id=name, after=after
            )
        )

    def supervisor(self, **options: Any) -> Supervisor:
        servers = {"nats_url": "nats://h", "etcd_url": "http://h"}
        given = plan.UpOptions(**({"model": "org/m"} | servers | options))
        return Supervisor(
            given,
            self.state,
            ProcessView(Console(file=self.printed, width=200), "starting"),
            self.self_checks_s,
        )

    @asynccontextmanager
    async def up(self, **options: Any) -> AsyncIterator[list[str]]:
        """Start them. Gives the lines that were printed until they were ready."""
        it = self.supervisor(**options)
        await it.start()
        try:
            yield self.printed.getvalue().splitlines()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            await it.watch(detached=False)

    def self_check(self, *results: dict[str, str], pulling: int) -> None:
        """What decode workers say of their self-checks from now on."""
        self.load = {"prefill_workers_pulling": pulling, "self_checks": list(results)}


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    monkeypatch.setattr(local_servers, "nats_ready", lambda *_: None)
    monkeypatch.setattr(local_servers, "etcd_ready", lambda *_: None)
    monkeypatch.setattr(EtcdClient, "connect", rig.registry.connect)
    monkeypatch.setattr(plan, "worker_specs", lambda *_: rig.specs)
    rig.self_check(pulling=1)
    with serving(lambda *_: (200, {"load": rig.load})) as url:
        rig.registry.http = url
        yield rig


async def test_a_worker_starts_when_the_one_before_it_on_its_gpu_is_ready(rig: Rig) -> None:
    for name, after in (("decode-0", ""), ("decode-1", ""), ("prefill-0", "decode-0")):
        rig.add(name, after)
    async with rig.up(frontends=0) as printed:
        assert [" ".join(line.split()[:2]) for line in printed] == [
            "decode-0 starting", "decode-1 starting", "prefill-0 waiting",
            "decode-0 ready", "decode-1 ready", "prefill-0 starting", "prefill-0 ready",
        ]  # fmt: skip


async def test_up_shows_the_login_of_the_security_file_to_etcd(rig: Rig) -> None:
    login = ServerSecurity(user="u", password_file="p")
    rig.add("decode-0")
    async with rig.up(frontends=0, security=Security(etcd=login)):
        assert rig.registry.logins
        assert all(shown == login for shown in rig.registry.logins)


async def test_a_server_whose_port_is_taken_gets_another(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports: list[int] = []

    def command(directory: Path, port: int) -> list[str]:
        ports.append(port)
        taken = "sleep 0.3; echo listen: address already in use; exit 1"
        return ["sh", "-c", taken if len(ports) == 1 else "exec sleep 60"]

    def problem(url: str) -> str | None:
        return "no answer" if url.endswith(f":{ports[0]}") else None

    monkeypatch.setattr(local_servers, "nats_command", command)
    monkeypatch.setattr(local_servers, "nats_ready", problem)
    monkeypatch.setattr(local_servers, "etcd_command", lambda *_: ["sleep", "60"])
    async with rig.up(frontends=0, nats_url=None, etcd_url=None):
        first, second = ports
        assert first != second
        cluster = rig.state.cluster()
        assert cluster is not None
        assert cluster.nats_url == f"nats://127.0.0.1:{second}"
        assert cluster.etcd_url.startswith("http://127.0.0.1:")
        assert {entry.name for entry in rig.state.live()} == {"nats", "etcd"}


@pytest.mark.parametrize("model", ["org/m", "demo"])
async def test_an_interrupted_start_leaves_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str
) -> None:
    """Workers that never get ready, or the demo model that takes a minute to make."""
    rig.add("decode-0")
    rig.registry.ready_at = 1_000_000
    if model == "demo":
        program = tmp_path / "python"
        program.write_text("#!/bin/sh\nexec sleep 60\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
    starting = asyncio.create_task(rig.supervisor(frontends=0, model=model).start())
    begun = "decode-0     starting" if model != "demo" else "demo model   starting"
    await asyncio.to_thread(eventually, lambda: begun in rig.printed.getvalue(), begun)
    launch = rig.state.launch()
    assert launch is not None
    assert launch.model == model
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Interrupted):
        await starting
    assert tagged(launch.cluster_id) == []
    assert (rig.state.live(), rig.state.launch()) == ([], None)


async def test_frontends_keep_off_the_cores_of_workers(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    usable = os.sched_getaffinity(0)
    monkeypatch.setattr(plan, "frontend_cores", lambda _: {min(usable)})
    for name in ("decode-0", "frontend-0"):
        rig.add(name)
    async with rig.up(port=0, prefill=0):
        cores = {entry.role: os.sched_getaffinity(entry.pid) for entry in rig.state.live()}
    assert cores == {"decode": usable, "frontend": {min(usable)}}


async def test_a_frontend_of_stock_servers_is_not_waited_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may come later, by heartbeats for example."""
    monkeypatch.setattr(members, "why_not_ready", lambda *_, **__: ["no server is ready"])
    rig.add("frontend-0")
    stock = FrontendOptions(forwarder=ForwarderName.STAGED, servers="decode=http://h:1")
    async with asyncio.timeout(60.0), rig.up(decode=0, prefill=0, port=0, frontend=stock) as lines:
        assert any(line.startswith("frontend-0   ready") for line in lines)


async def test_a_start_whose_etcd_goes_away_ends_soon(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after --ready-timeout."""
    monkeypatch.setattr(supervisor, "SERVER_S", 0.1)
    rig.add("decode-0")
    rig.registry.away = True
    async with asyncio.timeout(60.0):
        with pytest.raises(RegistryUnavailable, match="etcd is away"):
            await rig.supervisor(frontends=0).start()
    assert rig.state.live() == []


async def test_a_process_that_cannot_be_watched_is_told(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def keep(*_: object) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(supervisor.Keeper, "keep", keep)
    rig.add("decode-0")
    async with rig.up(frontends=0):
        """Then it is stopped."""
    assert (
        "decode-0 is not watched any more: OSError('too many open files')" in rig.printed.getvalue()
    )


async def test_a_deleted_state_directory_leaves_nothing_running(rig: Rig) -> None:
    rig.add("decode-0")
    async with asyncio.timeout(60.0), rig.up(frontends=0):
        (entry,) = rig.state.live()
        shutil.rmtree(rig.state.path)
    assert not is_alive(identity(entry))


async def test_up_waits_for_the_self_checks_and_says_if_they_take_too_long(rig: Rig) -> None:
    """Until they are over, prompts stay on the decode worker."""
    rig.add("decode-0")
    rig.add("prefill-0")
    rig.self_check(PASSED, PENDING, pulling=1)

    async def ready() -> list[str]:
        async with rig.up(frontends=0) as printed:
            return printed

    starting = asyncio.create_task(ready())
    await asyncio.to_thread(
        eventually, lambda: "prefill-0    ready" in rig.printed.getvalue(), "all are ready"
    )
    for pulling in (1, 0):  # another kind is to be compared, then nobody is connected
        await asyncio.sleep(0.15)
        assert not starting.done()
        rig.self_check(PASSED, pulling=1 - pulling)
    assert "self-check" not in "".join(await starting)
    rig.self_check(PENDING, pulling=0)
    rig.self_checks_s = 0.3
    async with rig.up(frontends=0) as printed:
        assert any("decode-0: the self-checks are not over yet" in line for line in printed)
