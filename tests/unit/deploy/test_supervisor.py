"""How `up` starts a cluster, and restarts what ends, also on a full disk.

Its processes are scripts of `sh`. NATS is away, and `_Registry` stands for etcd.
"""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pullfill.config import ClusterRef, ProcessEntry
from pullfill.deploy import local_servers, members, plan, supervisor
from pullfill.deploy.down import SERVERS
from pullfill.deploy.state import StateDir, is_alive, tagged
from pullfill.deploy.supervisor import MAX_DEATHS, WINDOW_S, Deaths, Supervisor
from pullfill.deploy.view import ProcessView
from pullfill.errors import RegistryUnavailable
from pullfill.net.security import Security, ServerSecurity
from pullfill.options import FrontendOptions
from pullfill.runtime.lifecycle import LEAVING_ENV, STEP_FAILED
from pullfill.wire import WorkerRecord
from tests.support.http_stub import serving
from tests.support.waiting import eventually
from tests.support.workers import record

PENDING = {"result": "pending"}
PASSED = {"result": "passed"}
SLEEP = "exec sleep 60"


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

    @asynccontextmanager
    async def connected(self, ref: ClusterRef, **_: object) -> AsyncIterator[None]:
        self.logins.append(ref.security.etcd)
        yield

    async def workers(self, *_: object) -> list[WorkerRecord]:
        if self.away:
            raise RegistryUnavailable("etcd is away")
        self._looks.update(str(entry.instance_id) for entry in self._state.live())
        return [
            record(n, http=self.http) for n, looks in self._looks.items() if looks >= self.ready_at
        ]


class Rig:
    """One `up` of such processes, and what it prints."""

    def __init__(self, directory: Path) -> None:
        self.state = StateDir(directory)
        self.registry = _Registry(self.state)
        self.specs: list[plan.ProcessSpec] = []
        self.printed = io.StringIO()
        self.load: dict[str, Any] = {}
        self.self_checks_s = 600.0

    def add(self, name: str, script: str = SLEEP, after: str = "") -> plan.ProcessSpec:
        """Add a process to those that `up` starts."""
        spec = plan.ProcessSpec(
            name=name,
            role=name.split("-")[0],
            argv=["sh", "-c", script, "--instance-id", name],
            env={"PATH": "/usr/bin:/bin"},
            instance_id=None if name in SERVERS else name,
            after=after,
        )
        self.specs.append(spec)
        return spec

    def supervisor(self, **options: Any) -> Supervisor:
        defaults = {"model": "org/m", "nats_url": "nats://h", "etcd_url": "http://h"}
        view = ProcessView(Console(file=self.printed, width=200))
        given = plan.UpOptions(**(defaults | {"frontends": 0} | options))
        return Supervisor(given, self.state, view, self.self_checks_s, first_pause_s=0.001)

    @asynccontextmanager
    async def up(self, **options: Any) -> AsyncIterator[list[str]]:
        """Start them, and watch them. Gives the lines that were printed until they were ready."""
        it = self.supervisor(**options)
        await it.start()
        lines = self.printed.getvalue().splitlines()
        watching = asyncio.create_task(it.watch(detached=False))
        try:
            yield lines
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            await watching

    def said(self) -> str:
        return " ".join(self.printed.getvalue().split())

    def recorded(self) -> dict[str, ProcessEntry]:
        """As other processes read it."""
        cluster = self.state.cluster()
        assert cluster is not None
        return {entry.name: entry for entry in cluster.processes}

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.recorded()[name].pid, number)

    def self_check(self, *results: dict[str, str], pulling: int) -> None:
        """What decode workers say of their self-checks from now on."""
        self.load = {"prefill_workers_pulling": pulling, "self_checks": list(results)}


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    monkeypatch.setattr(local_servers, "nats_ready", lambda *_: None)
    monkeypatch.setattr(local_servers, "etcd_ready", lambda *_: None)
    monkeypatch.setattr(members, "etcd_of", rig.registry.connected)
    monkeypatch.setattr(members, "workers", rig.registry.workers)
    monkeypatch.setattr(plan, "worker_specs", lambda *_: rig.specs)
    rig.self_check(pulling=1)
    with serving(lambda *_: (200, {"load": rig.load})) as url:
        rig.registry.http = url
        yield rig


async def until(check: Callable[[], bool]) -> None:
    await asyncio.to_thread(eventually, check, "what the supervisor does")


async def test_a_worker_starts_when_the_one_before_it_on_its_gpu_is_ready(rig: Rig) -> None:
    login = ServerSecurity(user="u", password_file="p")
    for name, after in (("decode-0", ""), ("decode-1", ""), ("prefill-0", "decode-0")):
        rig.add(name, after=after)
    async with rig.up(security=Security(etcd=login)) as printed:
        assert [" ".join(line.split()[:2]) for line in printed] == [
            "decode-0 starting", "decode-1 starting", "prefill-0 waiting",
            "decode-0 ready", "decode-1 ready", "prefill-0 starting", "prefill-0 ready",
        ]  # fmt: skip
        assert {shown == login for shown in rig.registry.logins} == {True}


async def test_a_server_whose_port_is_taken_gets_another(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports: list[int] = []

    def command(directory: Path, port: int) -> list[str]:
        ports.append(port)
        taken = "sleep 0.3; echo listen: address already in use; exit 1"
        return ["sh", "-c", taken if len(ports) == 1 else SLEEP]

    def problem(url: str) -> str | None:
        return "no answer" if url.endswith(f":{ports[0]}") else None

    monkeypatch.setattr(local_servers, "nats_command", command)
    monkeypatch.setattr(local_servers, "nats_ready", problem)
    async with rig.up(nats_url=None):
        first, second = ports
        cluster = rig.state.cluster()
        assert cluster is not None
        assert first != second
        assert cluster.nats_url == f"nats://127.0.0.1:{second}"
        assert [entry.name for entry in rig.state.live()] == ["nats"]


async def test_an_interrupted_start_leaves_nothing(rig: Rig) -> None:
    """A worker that never gets ready."""
    rig.add("decode-0")
    rig.registry.ready_at = 1_000_000
    starting = asyncio.create_task(rig.supervisor(model="demo").start())
    await until(lambda: "decode-0     starting" in rig.printed.getvalue())
    launch = rig.state.cluster()
    assert launch is not None
    assert launch.model == "demo"
    os.kill(os.getpid(), signal.SIGTERM)
    assert not await starting
    assert tagged(launch.cluster_id) == []
    assert (rig.state.live(), rig.state.cluster()) == ([], None)


async def test_a_frontend_of_stock_servers_is_not_waited_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may come later, by heartbeats for example."""
    monkeypatch.setattr(members, "why_not_ready", lambda *_, **__: ["no server is ready"])
    rig.add("frontend-0")
    stock = FrontendOptions(servers="decode=http://h:1")
    async with (
        asyncio.timeout(60.0),
        rig.up(decode=0, prefill=0, frontends=1, port=0, frontend=stock) as lines,
    ):
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
            await rig.supervisor().start()
    assert rig.state.live() == []


async def test_a_deleted_state_directory_leaves_nothing_running(rig: Rig) -> None:
    rig.add("decode-0")
    async with asyncio.timeout(60.0), rig.up():
        (entry,) = rig.state.live()
        shutil.rmtree(rig.state.path)
    assert not is_alive(entry)


async def test_up_waits_for_the_self_checks_and_says_if_they_take_too_long(rig: Rig) -> None:
    """Until they are over, prompts stay on the decode worker."""
    rig.add("decode-0")
    rig.add("prefill-0")
    rig.self_check(PASSED, PENDING, pulling=1)

    async def ready() -> list[str]:
        async with rig.up() as printed:
            return printed

    starting = asyncio.create_task(ready())
    await until(lambda: "prefill-0    ready" in rig.printed.getvalue())
    for pulling in (1, 0):  # another kind is to be compared, then nobody is connected
        await asyncio.sleep(0.15)
        assert not starting.done()
        rig.self_check(PASSED, pulling=1 - pulling)
    assert "self-check" not in "".join(await starting)
    rig.self_check(PENDING, pulling=0)
    rig.self_checks_s = 0.3
    async with rig.up() as printed:
        assert any("decode-0: the self-checks are not over yet" in line for line in printed)


# ------------------------------------------------------------------ restarts


@pytest.mark.parametrize(
    ("at", "blameless", "pauses"),
    [
        (range(5), False, [0.5, 1, 2, 4, None]),
        (
            [0, *(WINDOW_S + 1 + i * WINDOW_S / 5 for i in range(5))],
            False,
            [0.5, 0.5, 1, 2, 4, None],
        ),
        (range(8), True, [0.5, 1, 2, 4, 8, 16, 30, 30]),
    ],
    ids=["at once", "later", "which a request may have caused"],
)
def test_pauses_after_deaths_grow_and_end(
    at: list[float], blameless: bool, pauses: list[float | None]
) -> None:
    deaths = Deaths()
    assert [deaths.pause(now, blameless=blameless) for now in at] == pauses


async def test_a_worker_that_dies_while_it_drains_is_not_started_again(rig: Rig) -> None:
    dies = f'touch "${LEAVING_ENV}"; kill -9 $$'
    rig.add("decode-0", f"trap '{dies}' TERM; while :; do sleep 0.02; done")
    async with rig.up():
        rig.kill("decode-0", signal.SIGTERM)
        await until(lambda: "finished (told to leave, then " in rig.said())


@pytest.mark.essential
async def test_a_worker_whose_engine_fails_on_requests_is_not_given_up(
    rig: Rig, tmp_path: Path
) -> None:
    rig.add("decode-0", f"test -e {tmp_path}/deadly && exit {STEP_FAILED}; {SLEEP}")
    async with rig.up():
        (tmp_path / "deadly").touch()
        rig.kill("decode-0")
        await until(lambda: rig.recorded()["decode-0"].restarts > MAX_DEATHS)
    assert "gave up" not in rig.said()


async def test_without_restarts_a_death_is_only_told(rig: Rig) -> None:
    for name in ("decode-0", "prefill-0"):
        rig.add(name)
    async with rig.up(restart=False):
        rig.kill("decode-0")
        await until(lambda: "decode-0 died (killed by SIGKILL)" in rig.said())
        assert rig.recorded()["decode-0"].restarts == 0


@pytest.mark.parametrize("how", ["down", "signal"])
async def test_nothing_is_started_while_the_cluster_stops(rig: Rig, how: str) -> None:
    """The lock is taken, as by `pullfill down`, before the process dies."""
    rig.add("decode-0")
    async with rig.up():
        with rig.state.locked():
            rig.kill("decode-0")
            await until(lambda: "decode-0 died" in rig.said())
            await asyncio.sleep(0.05)
            if how == "down":
                rig.state.mark_stopping()
            else:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.05)
        if how == "down":  # it ends without the signal that `rig.up` sends
            await until(lambda: rig.state.cluster() is None)
    assert "restarts: 1" not in rig.said()
