"""How `up` restarts processes that end, also on a full disk: real processes, shortened pauses."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path

import pytest
from rich.console import Console

from pullfill.config import STATE_DIR_ENV, ClusterFile, ClusterRef, ProcessEntry
from pullfill.deploy import doctor, plan, status
from pullfill.deploy.down import SERVERS
from pullfill.deploy.state import Launch, StateDir
from pullfill.deploy.supervisor import (
    MAX_DEATHS,
    WINDOW_S,
    Children,
    Deaths,
    DiskWatch,
    Keeper,
)
from pullfill.deploy.view import ProcessView
from pullfill.errors import ConfigError
from pullfill.runtime.lifecycle import LEAVING_ENV, STEP_FAILED
from tests.support.small_disk import full, small_disk
from tests.support.waiting import eventually

PATIENCE_S = 20.0


class TestDeaths:
    def test_pauses_grow_and_end(self) -> None:
        deaths = Deaths()
        assert [deaths.pause(float(i)) for i in range(5)] == [0.5, 1.0, 2.0, 4.0, None]

    def test_five_within_the_window_are_enough_at_any_time(self) -> None:
        deaths = Deaths()
        assert deaths.pause(0.0) == 0.5
        late = [WINDOW_S + 1 + i * WINDOW_S / 5 for i in range(5)]
        assert [deaths.pause(now) for now in late] == [0.5, 1.0, 2.0, 4.0, None]

    def test_deaths_that_a_request_may_have_caused_only_make_pauses_longer(self) -> None:
        deaths = Deaths()
        pauses = [deaths.pause(float(i), blameless=True) for i in range(8)]
        assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
        assert [deaths.pause(float(i)) for i in range(8, 13)] == [30.0] * 4 + [None]


class Rig:
    """A keeper over processes of `sh`, each with its log."""

    def __init__(self, directory: Path) -> None:
        self.state = StateDir(directory)
        self.state.logs.mkdir(parents=True)
        self.state.write_launch(Launch(cluster_id="id", model="m"))
        cluster = ClusterFile(namespace="n", nats_url="q", etcd_url="e", frontend_url="")
        self.output = io.StringIO()
        view = ProcessView(Console(file=self.output, width=200), "test")
        self.stop = asyncio.Event()
        self.children = Children(cluster, self.state, view)
        self.options = plan.UpOptions()
        self.keeper = Keeper(self.options, self.children, self.stop, "id", first_pause_s=0.001)
        self.disk = DiskWatch(self.children, restart=True)

    def launch(self, name: str, script: str) -> None:
        spec = plan.ProcessSpec(
            name=name,
            role=name.split("-")[0],
            argv=["sh", "-c", script, "--instance-id", "old"],
            env={"PATH": "/usr/bin:/bin"},
            instance_id=None if name in SERVERS else "old",
        )
        self.children.launch(spec)

    def said(self) -> str:
        return " ".join(self.output.getvalue().split())

    def recorded(self) -> dict[str, ProcessEntry]:
        """As other processes read it."""
        cluster = self.state.cluster()
        assert cluster is not None
        return {entry.name: entry for entry in cluster.processes}

    @asynccontextmanager
    async def keeping(self, name: str) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(self.keeper.keep(name))
        try:
            yield task
        finally:
            self.stop.set()
            self.kill_all()
            await asyncio.wait_for(task, PATIENCE_S)

    def kill_all(self) -> None:
        for name in self.children.running:
            self.children.running[name].kill()
        self.children.reap()


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Rig]:
    """Its state directory is on a real disk of 40 MiB."""
    with small_disk(tmp_path / "disk", 40) as directory:
        rig = Rig(directory)
        yield rig
        rig.kill_all()


async def until(check: Callable[[], bool]) -> None:
    await asyncio.to_thread(eventually, check, "what the keeper does")


async def test_a_worker_that_dies_while_it_drains_is_not_started_again(rig: Rig) -> None:
    rig.launch("decode-0", f'touch "${LEAVING_ENV}"; kill -9 $$')
    async with rig.keeping("decode-0") as task:
        await asyncio.wait_for(asyncio.shield(task), PATIENCE_S)
    assert "finished (told to leave, then " in rig.said()


@pytest.mark.essential
async def test_a_worker_whose_engine_fails_on_requests_is_not_given_up(rig: Rig) -> None:
    rig.launch("decode-0", f"exit {STEP_FAILED}")
    async with rig.keeping("decode-0"):
        await until(lambda: rig.recorded()["decode-0"].restarts > MAX_DEATHS)
    assert "gave up" not in rig.said()


async def test_status_and_doctor_say_how_to_start_another_for_one_that_was_drained(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.children.cluster.frontend_url = "http://127.0.0.1:8000"
    for name in ("prefill-0", "frontend-0"):
        rig.launch(name, "exit 0")
        await asyncio.wait_for(rig.keeper.keep(name), PATIENCE_S)
    ref, where = ClusterRef("n", "e", "q", rig.state.path), f"--state-dir {rig.state.path}"
    told, same_port, *_ = status.process_lines(status.processes(ref))
    command = f"pullfill prefill {where}"
    assert told == f"prefill-0 was drained. To start another: `{command}`"
    assert f"`pullfill frontend {where} --port 8000 --own-port 0`" in same_port
    assert next(found.what for found in doctor.processes(ref)) == told
    monkeypatch.setenv(STATE_DIR_ENV, str(rig.state.path))
    assert status.processes(ref)["processes"][0]["start_another"] == "pullfill prefill"


async def test_a_lock_that_cannot_be_opened_costs_one_try(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.launch("decode-0", "sleep 60")
    opened = rig.state.locked

    def locked() -> AbstractContextManager[None]:
        monkeypatch.setattr(rig.state, "locked", opened)
        raise ConfigError("too many open files")

    monkeypatch.setattr(rig.state, "locked", locked)
    async with rig.keeping("decode-0"):
        rig.children.running["decode-0"].kill()
        await until(lambda: rig.recorded()["decode-0"].restarts == 1)
    assert "decode-0 was not started again: too many open files" in rig.said()


@pytest.mark.parametrize("how", ["down", "signal"])
async def test_nothing_is_started_while_the_cluster_stops(rig: Rig, how: str) -> None:
    """The lock is taken, as by `pullfill down`, before the process dies."""
    rig.launch("decode-0", "sleep 60")
    async with rig.keeping("decode-0") as task:
        with rig.state.locked():
            rig.children.running["decode-0"].kill()
            await until(lambda: "decode-0 died" in rig.said())
            await asyncio.sleep(0.05)
            assert not task.done()
            if how == "down":
                rig.state.mark_stopping()
            else:
                rig.stop.set()
        await asyncio.wait_for(task, PATIENCE_S)
    assert rig.recorded()["decode-0"].restarts == 0


# ------------------------------------------------------------------ a full disk


def test_it_is_told_once_and_what_it_broke_is_mended(small: Rig) -> None:
    small.launch("nats", "echo no space left on device; exec sleep 60")
    with full(small.state.path):
        for name in ("etcd", "decode"):
            small.launch(name, "sleep 60")
        for _ in range(2):
            small.disk.look()
        assert list(small.recorded()) == ["nats"], "the old record is whole"
        assert not list(small.state.path.glob(".*")), "no half of a file is left"
        assert small.said().count("is full (0 MiB free): serving goes on") == 1
        assert small.said().count("(No space left on device): other commands see an old list") == 1
        assert all(small.children.running[name].poll() is None for name in small.children.running)
    small.disk.look()
    assert list(small.recorded()) == ["nats", "etcd", "decode"]
    assert "has room again" in small.said()
    assert small.said().count("nats starts again: it met a full disk") == 1
    assert small.children.running["nats"].wait(10) == -15, "it would go on storing nothing"
    assert small.children.running["etcd"].poll() is None
    small.disk.look()
    assert small.said().count("nats starts again") == 1


def test_a_disk_that_was_full_for_a_moment(small: Rig) -> None:
    """Between two looks. The log of NATS tells it."""
    small.launch("nats", "echo '[ERR] write 1.blk: no space left on device'; exec sleep 60")
    eventually(lambda: small.state.log_of("nats").stat().st_size > 0, "it tells")
    small.disk.look()
    assert small.children.running["nats"].wait(10) == -15
    small.launch("nats", "sleep 60")
    small.disk.look()
    assert small.children.running["nats"].poll() is None, "that line is about the process before"
