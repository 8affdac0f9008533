"""Orders to the `up` of this machine: `pullfill scale` and the like ask its supervisor.

Only the supervisor starts and stops processes, so it must carry the orders out. It listens on the
Unix socket STATE/orders, which belongs to its user alone. A client sends one order as a line of
JSON. The supervisor answers with lines, and the last one holds the exit code. Orders do not go
through etcd as orders of roles do: `decode-0` is a name of one state directory, and whoever gave
the order waits for what comes of it.

One order at a time: another one is refused meanwhile. An order goes on if its client leaves. It
ends where it stands if the cluster is stopped. If the supervisor dies, the client says so.
"""

from __future__ import annotations

import asyncio
import os
import socket
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

import msgspec
import typer

from pullfill.deploy.procs import is_alive
from pullfill.deploy.state import StateDir
from pullfill.errors import ConfigError, IncompatibleError, PullfillError, UnavailableError

SOCKET = "orders"
MAX_LINE = 1 << 20
_FIRST_LINE_S = 5.0


class _Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="order"):
    """Base of all orders."""


class Scale(_Order, frozen=True, tag="scale"):
    """counts: how many processes of a role there shall be, by role."""

    counts: dict[str, int]


class Restart(_Order, frozen=True, tag="restart"):
    """names: of processes, e.g. decode-0. Each is drained, then started again."""

    names: list[str]


class Upgrade(_Order, frozen=True, tag="upgrade"):
    """names: of processes. Each gets a successor that runs what is installed now. Empty: all."""

    names: list[str] = []


Order: TypeAlias = Scale | Restart | Upgrade
Say: TypeAlias = Callable[[str], None]


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line to the client. code: the exit code, in the last line. error: why it failed."""

    said: str = ""
    code: int | None = None
    error: str = ""


# --------------------------------------------------------------------------- the supervisor


class OrderDesk:
    """Takes orders within `async with`, and has them carried out.

    carry_out: gets an order, and a function that tells the client a line. Raises PullfillError.
    log: prints a line for whoever reads the supervisor's output.

    Without room for the socket, one line says so, and the cluster runs on without orders."""

    def __init__(
        self, state: StateDir, carry_out: Callable[[Order, Say], Awaitable[None]], log: Say
    ) -> None:
        self._state = state
        self._carry_out = carry_out
        self._log = log
        self._under_way = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> OrderDesk:
        listener = socket.socket(socket.AF_UNIX)
        try:
            with _address(self._state) as path:
                with suppress(FileNotFoundError):
                    os.unlink(path)
                before = os.umask(0o177)
                try:
                    listener.bind(path)
                finally:
                    os.umask(before)
        except OSError as exc:
            listener.close()
            self._log(f"takes no orders, e.g. of `pullfill scale`: no socket ({exc.strerror})")
            return self
        self._server = await asyncio.start_unix_server(self._client, sock=listener, limit=MAX_LINE)
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the order that is under way where it stands."""
        if self._server is None:
            return
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(OSError):
            os.unlink(self._state.path / SOCKET)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def answer(one: Answer) -> None:
            if not writer.is_closing():
                writer.write(msgspec.json.encode(one) + b"\n")

        try:
            answer(await self._answered(reader, lambda text: answer(Answer(said=text))))
            await writer.drain()
        except asyncio.CancelledError:
            answer(Answer(code=1, error="the cluster is being stopped: the order ends here"))
        except OSError:
            pass  # the client has left
        finally:
            writer.close()

    async def _answered(self, reader: asyncio.StreamReader, say: Say) -> Answer:
        try:
            line = await asyncio.wait_for(reader.readline(), _FIRST_LINE_S)
            order: Order = msgspec.json.decode(line, type=Order)
        except (msgspec.MsgspecError, ValueError, TimeoutError) as exc:
            return Answer(code=2, error=f"the supervisor does not know this order: {exc}")
        if self._under_way:
            return Answer(code=1, error=f"{self._under_way} is under way: try again after it")
        self._under_way = in_words(order)
        self._log(f"order: {self._under_way}")
        try:
            await self._carry_out(order, say)
        except (PullfillError, OSError) as exc:
            self._log(f"{self._under_way}: {exc}")
            wrong = isinstance(exc, ConfigError | IncompatibleError)
            return Answer(code=2 if wrong else 1, error=str(exc))
        except Exception as exc:  # a fault of ours must not look like the supervisor's end
            self._log(f"{self._under_way}: {''.join(traceback.format_exception(exc))}")
            return Answer(code=1, error=f"a fault of pullfill: {type(exc).__name__}: {exc}")
        finally:
            self._under_way = ""
        return Answer(code=0)


def in_words(order: Order) -> str:
    """Return the order as it was typed."""
    if isinstance(order, Scale):
        return " ".join(["scale", *(f"{role}={n}" for role, n in order.counts.items())])
    return " ".join(["restart" if isinstance(order, Restart) else "upgrade", *order.names])


# --------------------------------------------------------------------------- the client


def give(state: StateDir, order: Order) -> int:
    """Give the order, print what comes of it, and return the exit code.

    Raises UnavailableError if no supervisor answers."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            with _address(state) as path:
                connection.connect(path)
        except OSError:
            raise UnavailableError(_nobody(state)) from None
        connection.sendall(msgspec.json.encode(order) + b"\n")
        with connection.makefile("rb") as lines, suppress(ConnectionError):
            for line in lines:
                answer = msgspec.json.decode(line, type=Answer)
                if answer.said:
                    typer.echo(answer.said)
                if answer.code is not None:
                    return _ended(answer)
    raise UnavailableError(
        f"the supervisor ended before the order was done: `pullfill status` shows what runs, "
        f"{state.log_of('supervisor')} shows why"
    )


def _ended(answer: Answer) -> int:
    if answer.code and answer.error:
        raise (ConfigError if answer.code == 2 else UnavailableError)(answer.error)
    return answer.code or 0


def _nobody(state: StateDir) -> str:
    state.refuse_foreign()
    launch = state.launch()
    if launch is not None and is_alive(launch.supervisor):
        return f"the `pullfill up` of {state.path} is still starting or stopping: try again"
    if launch is None or not state.live():
        return f"no cluster runs from {state.path}: start one with `pullfill up`"
    why = f"the supervisor (pid {launch.supervisor_pid}) is gone"
    if not launch.restart:
        why = "it was started with --no-restart --detach"
    return f"nobody supervises the cluster of {state.path}: {why}. Use `pullfill down`, then `up`"


@contextmanager
def _address(state: StateDir) -> Iterator[str]:
    """Give the path of the socket. Raises OSError if there is no such directory."""
    # The path of a Unix socket has at most 107 bytes, that of a state directory may have more.
    fd = os.open(state.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET}"
    finally:
        os.close(fd)
