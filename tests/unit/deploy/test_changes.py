"""Orders to `up`: which processes start and end, in what order. They are `sh`, always ready."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pullfill.config import ClusterFile, ClusterRef
from pullfill.deploy import accelerator, changes, defaults, keeper, plan, procs
from pullfill.deploy.changes import Changes
from pullfill.deploy.children import Children, StartFailed
from pullfill.deploy.down import stop_phase
from pullfill.deploy.keeper import Keeper
from pullfill.deploy.orders import Restart, Scale
from pullfill.deploy.procs import is_alive
from pullfill.deploy.state import Launch, StateDir, identity
from pullfill.deploy.view import ProcessView
from pullfill.errors import ConfigError, RegistryUnavailable, UnavailableError
from pullfill.net.this_host import SHM_DIR_ENV
from pullfill.options import ForwarderName, FrontendOptions
from tests.support.waiting import eventually

REF = ClusterRef("n", "http://h:1", "nats://h:1")
DRAINS = "trap 'exit 0' TERM; echo up $$; while :; do sleep 0.02; done"
"""A process that stands for a worker. It prints `up` and its pid when SIGTERM will end it well."""


class Rig:
    """A supervisor's parts over processes of `sh`."""

    drains = DRAINS

    def __init__(self, directory: Path) -> None:
        self.state = StateDir(directory)
        self.state.logs.mkdir(parents=True)
        self.state.write_launch(Launch(cluster_id="id", model="m"))
        file = ClusterFile(namespace="n", nats_url="q", etcd_url="e", frontend_url="")
        view = ProcessView(Console(file=io.StringIO(), width=200), "test")
        self.stop = asyncio.Event()
        self.children = Children(file, self.state, view)
        self.options = plan.UpOptions(decode=2, prefill=1, frontends=1)
        self.keeper = Keeper(self.options, self.children, self.stop, "id")
        self.changes = Changes(self.options, self.children, self.keeper, REF, "id")
        self.said: list[str] = []
        self.place = defaults.Placement()
        self.fails: set[str] = set()
        self.error: type[UnavailableError] = StartFailed
        self.etcd_away = False

    @asynccontextmanager
    async def etcd_of(self, _: ClusterRef) -> AsyncIterator[None]:
        if self.etcd_away:
            raise RegistryUnavailable("etcd did not answer")
        yield

    def spec(self, name: str) -> plan.ProcessSpec:
        role = name.split("-")[0]
        return plan.ProcessSpec(
            name=name,
            role=role,
            argv=["sh", "-c", self.drains, "--instance-id", f"{name}-first"],
            env={"PATH": "/usr/bin:/bin"},
            instance_id=f"{name}-first",
            place=defaults.Placement() if role == "frontend" else self.place,
        )

    async def ready(self, *given: Any) -> None:
        """Stands for `wait_ready`."""
        specs: Sequence[plan.ProcessSpec] = given[3]
        for spec in specs:
            if spec.name in self.fails:
                raise self.error(f"{spec.name} died while starting")
        await self._handle_sigterm(*(spec.name for spec in specs))

    async def _handle_sigterm(self, *names: str) -> None:
        """Wait until these processes have printed `up`. Older ones may have used the same log."""
        them = [self.children.entry(name) for name in names]
        await asyncio.to_thread(
            eventually,
            lambda: all(f"up {e.pid}\n" in Path(e.log).read_text() for e in them),
            "they are not up",
        )

    @asynccontextmanager
    async def up(self, *names: str) -> AsyncIterator[Rig]:
        for name in names or ("decode-0", "decode-1", "prefill-0", "frontend-0"):
            self.children.launch(self.spec(name))
        self.keeper.watch(*self.children.names)
        try:
            await self._handle_sigterm(*self.children.names)
            yield self
        finally:
            self.stop.set()
            for name in self.children.names:
                self.children[name].kill()
            await self.keeper.forget(*self.keeper.watched)
            self.children.reap()

    async def order(self, order: Scale | Restart) -> None:
        await asyncio.wait_for(self.changes.carry_out(order, self.said.append), 30)

    async def scale(self, **counts: int) -> None:
        await self.order(Scale(counts=counts))

    @property
    def alive(self) -> set[str]:
        """As other processes read it."""
        file = self.state.cluster()
        assert file is not None
        return {e.name for e in file.processes if is_alive(identity(e))}

    def pid(self, name: str) -> int:
        return self.children.entry(name).pid


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    rig = Rig(tmp_path)
    monkeypatch.setenv(accelerator.DEVICE_ENV, "cpu")
    monkeypatch.setattr(defaults, "usable_cores", lambda: [0, 1, 2])
    monkeypatch.setattr(keeper, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(changes, "etcd_of", rig.etcd_of)
    monkeypatch.setattr(changes, "wait_ready", rig.ready)
    monkeypatch.setattr(changes, "keep_frontends_off", lambda *_: None)
    monkeypatch.setattr(keeper, "keep_frontends_off", lambda *_: None)
    monkeypatch.setattr(changes.plan, "worker_spec", lambda *given: rig.spec(given[3]))
    return rig


async def test_more_and_fewer(rig: Rig) -> None:
    async with rig.up():
        kept = rig.pid("decode-0"), rig.pid("frontend-0")
        await rig.scale(prefill=3, decode=1)
        assert rig.alive == {"decode-0", "prefill-0", "prefill-1", "prefill-2", "frontend-0"}
        assert kept == (rig.pid("decode-0"), rig.pid("frontend-0"))
        file = rig.state.cluster()
        assert file is not None
        assert "decode-1" not in [e.name for e in file.processes]
        assert (rig.options.decode, rig.options.prefill, rig.options.frontends) == (1, 3, 1)
        assert rig.said.index("prefill-1, prefill-2 starts") < rig.said.index("decode-1 drains")
        rig.children["prefill-2"].kill()
        await asyncio.to_thread(
            eventually, lambda: rig.children.entry("prefill-2").restarts == 1, "it is kept"
        )
        assert "decode-1" not in rig.keeper.watched


async def test_free_numbers_are_used_again(rig: Rig) -> None:
    async with rig.up("decode-0", "prefill-0", "prefill-1"):
        rig.children["prefill-0"].terminate()  # drained by hand
        await asyncio.to_thread(eventually, lambda: "prefill-0" not in rig.keeper.watched, "gone")
        await rig.scale(prefill=3)
        assert rig.alive == {"decode-0", "prefill-0", "prefill-1", "prefill-2"}
        assert rig.said[0] == "prefill: 1 -> 3"


async def test_a_gpu_has_room_for_as_many_workers_as_at_the_start(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "gpu_count", lambda: 1)
    rig.place = defaults.Placement(gpus=(0,))
    async with rig.up():
        await rig.scale(prefill=0)
        await rig.scale(prefill=1)
        assert rig.alive == {"decode-0", "decode-1", "prefill-0", "frontend-0"}
        with pytest.raises(ConfigError, match="one more prefill worker needs 1 GPU"):
            await rig.scale(prefill=2)


async def test_as_it_is(rig: Rig) -> None:
    async with rig.up():
        before = {name: rig.pid(name) for name in rig.alive}
        await rig.scale(prefill=1, decode=2)
        assert {name: rig.pid(name) for name in rig.alive} == before
        assert rig.said == ["prefill: 1, as it is", "decode: 2, as it is"]


@pytest.mark.parametrize("error", [StartFailed, RegistryUnavailable])
@pytest.mark.parametrize("gpus", [(), (0,)], ids=["together", "one by one"])
async def test_if_one_does_not_start_all_are_taken_back(
    rig: Rig,
    error: type[UnavailableError],
    gpus: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SHM_DIR_ENV, str(tmp_path))
    left = tmp_path / "pullfill-prefill-1-first-kv"
    left.touch()
    rig.fails.add("prefill-2")
    rig.error, rig.place = error, defaults.Placement(gpus=gpus)
    async with rig.up():
        before = rig.alive
        with pytest.raises(error, match="prefill-2 died"):
            await rig.scale(prefill=3, decode=1)
        assert rig.alive == before, "and decode-1 still runs"
        assert set(rig.keeper.watched) == before
        assert rig.options.prefill == 1
        assert not left.exists()


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        ({"nats": 2}, "ROLE=N"),
        ({"decode": -1}, "ROLE=N"),
        ({"decode": 0}, "cannot serve"),
    ],
)
async def test_what_cannot_be(rig: Rig, counts: dict[str, int], why: str) -> None:
    async with rig.up():
        before = {name: rig.pid(name) for name in rig.alive}
        with pytest.raises(ConfigError, match=why):
            await rig.scale(**counts)
        assert {name: rig.pid(name) for name in rig.alive} == before


async def test_the_last_decode_worker_may_go_if_stock_servers_serve(rig: Rig) -> None:
    rig.options.frontend = FrontendOptions(forwarder=ForwarderName.STAGED)
    async with rig.up():
        await rig.scale(decode=0)
        assert {"frontend-0"} == {name for name in rig.alive if name[0] in "df"}


async def test_a_restart_is_no_death(rig: Rig) -> None:
    async with rig.up():
        old = {name: rig.pid(name) for name in rig.alive}
        await rig.order(Restart(names=["decode-1", "prefill-0"]))
        new = {name: rig.pid(name) for name in rig.alive}
        assert {name for name in new if new[name] != old[name]} == {"decode-1", "prefill-0"}
        entry = rig.children.entry("decode-1")
        assert entry.instance_id != "decode-1-first"
        assert entry.restarts == 0
        assert rig.said[0] == "decode-1 drains"
        assert not any("only" in line for line in rig.said)
        rig.children["decode-1"].kill()
        await asyncio.to_thread(
            eventually, lambda: rig.children.entry("decode-1").restarts == 1, "it is kept"
        )


async def test_nothing_ends_for_a_restart_while_etcd_is_away(rig: Rig) -> None:
    rig.etcd_away = True
    async with rig.up():
        before = {name: rig.pid(name) for name in rig.alive}
        with pytest.raises(UnavailableError, match=r"decode-1 was not restarted.*etcd did not"):
            await rig.order(Restart(names=["decode-1"]))
        assert {name: rig.pid(name) for name in rig.alive} == before
        assert rig.said == []


async def test_the_only_one_is_told(rig: Rig) -> None:
    async with rig.up():
        await rig.order(Restart(names=["frontend-0"]))
        assert rig.said[0].startswith("frontend-0 is the only frontend here: requests are refused")


async def test_a_restart_that_fails_is_tried_again(rig: Rig) -> None:
    rig.fails.add("decode-0")
    async with rig.up():
        with pytest.raises(StartFailed, match="`up` goes on trying to start decode-0"):
            await rig.order(Restart(names=["decode-0", "decode-1"]))
        assert "decode-0" in rig.keeper.watched
        assert "decode-1 drains" not in rig.said


async def test_a_restart_that_cannot_spawn_is_tried_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[object] = []

    def spawn(*given: Any, **more: Any) -> Any:
        tries.append(given)
        if len(tries) <= 2:
            raise OSError(11, "Resource temporarily unavailable")
        return procs.spawn(*given, **more)

    async with rig.up("decode-0", "decode-1"):
        old = rig.pid("decode-0")
        monkeypatch.setattr("pullfill.deploy.children.spawn", spawn)
        with pytest.raises(StartFailed, match="`up` goes on trying to start decode-0"):
            await rig.order(Restart(names=["decode-0"]))
        await asyncio.to_thread(eventually, lambda: rig.pid("decode-0") != old, "it is started")
        assert "decode-0" in rig.alive


async def test_without_restarts_nobody_goes_on_trying(rig: Rig) -> None:
    rig.options.restart = False
    rig.fails.add("decode-0")
    async with rig.up():
        with pytest.raises(StartFailed) as caught:
            await rig.order(Restart(names=["decode-0"]))
        assert "goes on" not in str(caught.value)


async def test_a_cluster_that_stops_lets_it_finish_its_drain(rig: Rig) -> None:
    """A second SIGTERM would end its streams."""
    go, log = rig.state.path / "go", rig.state.log_of("decode-1")
    rig.drains = f"trap 'echo told' TERM; echo up $$; while [ ! -e {go} ]; do sleep 0.02; done"
    async with rig.up("decode-0", "decode-1"):
        order = asyncio.create_task(rig.scale(decode=1))
        await asyncio.to_thread(eventually, lambda: "told" in log.read_text(), "it drains")
        order.cancel()
        await asyncio.gather(order, return_exceptions=True)
        rig.stop.set()
        file = rig.state.cluster()
        assert file is not None
        await rig.keeper.forget(*rig.keeper.watched)
        phase = asyncio.create_task(stop_phase(file.processes, rig.children.view, 30, bool))
        await asyncio.to_thread(
            eventually, lambda: "told" in rig.state.log_of("decode-0").read_text(), "all drain"
        )
        assert not phase.done()
        go.touch()
        assert await asyncio.wait_for(phase, 10) == []
    assert log.read_text().count("told") == 1


async def test_one_that_hangs_is_killed_after_its_time(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "EXIT_S", 0.1)
    monkeypatch.setattr(Changes, "_drain_s", lambda *_: 0.0)
    monkeypatch.setattr("pullfill.deploy.down.SECOND_TERM_GRACE_S", 0.1)
    async with rig.up("decode-0"):
        rig.children["decode-0"].send_signal(19)
        await rig.order(Restart(names=["decode-0"]))
        assert any("was killed after" in line for line in rig.said)


async def test_names_that_are_not_there(rig: Rig) -> None:
    async with rig.up():
        with pytest.raises(ConfigError, match=r"'decode-3': did you mean decode-"):
            await rig.order(Restart(names=["decode-0", "decode-3"]))
        assert rig.said == [], "nothing was done"


async def test_nothing_starts_while_the_cluster_stops(rig: Rig) -> None:
    async with rig.up():
        rig.state.mark_stopping()
        with pytest.raises(UnavailableError, match="is being stopped"):
            await rig.scale(prefill=2)
        assert "prefill-1" not in rig.alive


async def test_an_order_may_leave_nobody_to_watch(rig: Rig) -> None:
    async with rig.up("prefill-0"):
        ended = asyncio.create_task(rig.keeper.ended())
        await rig.order(Restart(names=["prefill-0"]))
        assert not ended.done()
        rig.children["prefill-0"].terminate()
        await asyncio.wait_for(ended, 20)
