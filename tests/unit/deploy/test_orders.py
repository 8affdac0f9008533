"""How orders reach the supervisor, and what a client is told."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from pullfill.deploy import orders
from pullfill.deploy.orders import Order, OrderDesk, Restart, Say, Scale, give
from pullfill.deploy.procs import start_time
from pullfill.deploy.state import Launch, StateDir
from pullfill.errors import ConfigError, UnavailableError

ORDER = Scale(counts={"prefill": 3})


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    directory = tmp_path / ("long" * 30)  # longer than the path of a Unix socket may be
    directory.mkdir()
    return StateDir(directory)


def desk(
    state: StateDir, carry_out: Callable[[Order, Say], Awaitable[None]], log: Say = lambda _: None
) -> OrderDesk:
    return OrderDesk(state, carry_out, log)


async def given(state: StateDir, order: Order = ORDER) -> int:
    return await asyncio.to_thread(give, state, order)


async def test_a_client_reads_each_step(
    state: StateDir, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Order] = []

    async def carry_out(order: Order, say: Say) -> None:
        seen.append(order)
        say("first")
        say("second")

    logged: list[str] = []
    async with desk(state, carry_out, logged.append):
        mode = (state.path / orders.SOCKET).stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
        assert await given(state) == 0
        assert await given(state, Restart(names=["decode-0", "decode-1"])) == 0
    assert seen == [ORDER, Restart(names=["decode-0", "decode-1"])]
    assert capsys.readouterr().out == "first\nsecond\n" * 2
    assert logged == ["order: scale prefill=3", "order: restart decode-0 decode-1"]
    assert not (state.path / orders.SOCKET).exists()


@pytest.mark.parametrize("error", [ConfigError("no good"), UnavailableError("no good")])
async def test_a_refusal_is_the_clients_error(state: StateDir, error: Exception) -> None:
    async def carry_out(order: Order, say: Say) -> None:
        raise error

    async with desk(state, carry_out):
        for _ in range(2):  # the first one does not keep the desk busy
            with pytest.raises(type(error), match="no good"):
                await given(state)


async def test_an_error_of_our_own_is_told_and_keeps_the_desk_open(
    state: StateDir, caplog: pytest.LogCaptureFixture
) -> None:
    logged: list[str] = []

    async def carry_out(order: Order, say: Say) -> None:
        raise KeyError("decode-7")

    async with desk(state, carry_out, logged.append):
        for _ in range(2):
            with pytest.raises(UnavailableError, match="KeyError: 'decode-7'"):
                await given(state)
    assert any("KeyError" in line for line in logged)


async def test_without_its_socket_the_cluster_runs_on(state: StateDir) -> None:
    logged: list[str] = []

    async def carry_out(order: Order, say: Say) -> None:
        raise AssertionError(order)

    (state.path / orders.SOCKET).mkdir()  # stands for a full disk
    async with desk(state, carry_out, logged.append):
        pass
    assert len(logged) == 1
    assert logged[0].startswith("takes no orders")


async def test_one_at_a_time_and_it_goes_on_without_its_client(state: StateDir) -> None:
    go, done = asyncio.Event(), asyncio.Event()

    async def carry_out(order: Order, say: Say) -> None:
        say("begun")
        await go.wait()
        say("nobody reads this")
        done.set()

    async with desk(state, carry_out):
        with orders._address(state) as path:
            reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b'{"order": "restart", "names": ["decode-0"]}\n')
        assert await reader.readline() == b'{"said":"begun"}\n'
        with pytest.raises(UnavailableError, match="restart decode-0 is under way"):
            await given(state)
        writer.close()
        await writer.wait_closed()
        go.set()
        await asyncio.wait_for(done.wait(), 10)


async def test_a_cluster_that_stops_ends_the_order(state: StateDir) -> None:
    begun = asyncio.Event()

    async def carry_out(order: Order, say: Say) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with desk(state, carry_out):
        client = asyncio.create_task(given(state))
        await begun.wait()
    with pytest.raises(UnavailableError, match="is being stopped"):
        await client


@pytest.mark.parametrize("line", [b"\n", b"{}\n", b'{"order": "fly"}\n', b"x" * 100 + b"\n"])
async def test_what_is_no_order(state: StateDir, line: bytes) -> None:
    async def carry_out(order: Order, say: Say) -> None:
        raise AssertionError(order)

    async with desk(state, carry_out):
        with orders._address(state) as path:
            reader, writer = await asyncio.open_unix_connection(path)
        writer.write(line)
        assert b"does not know this order" in await reader.readline()
        writer.close()
        await writer.wait_closed()


def test_a_supervisor_that_dies_in_the_middle(state: StateDir) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        with orders._address(state) as path:
            listener.bind(path)
        listener.listen()
        listener.settimeout(0.0)
        pid = os.fork()
        if pid == 0:
            listener.settimeout(None)
            listener.accept()[0].recv(100)
            os._exit(0)
        with pytest.raises(UnavailableError, match="the supervisor ended before the order"):
            give(state, ORDER)
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("launch", "told"),
    [
        (None, "no cluster runs from"),
        (Launch(cluster_id="c", model="m"), "no cluster runs from"),
        (Launch(cluster_id="c", model="m", supervisor_pid=os.getpid()), "starting or stopping"),
    ],
)
def test_nobody_listens(state: StateDir, launch: Launch | None, told: str) -> None:
    if launch is not None and launch.supervisor_pid:
        own = os.getpid()
        launch = Launch(
            cluster_id="c", model="m", supervisor_pid=own, supervisor_started=start_time(own) or 0
        )
    if launch is not None:
        state.write_launch(launch)
    with pytest.raises(UnavailableError, match=told) as caught:
        give(state, ORDER)
    assert "\n" not in str(caught.value)
