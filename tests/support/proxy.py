"""A TCP proxy that tests break on purpose: delay, blackhole, half-open, reset, at run time.

An asyncio loop in a thread of its own; each connection is two pumps, client → target ("up") and
target → client ("down"). Every mode acts on connections that are open already as well as on new
ones. No byte is lost while a connection stands: what falls into a blackhole waits in the sockets,
and goes on with `pass_all`, as TCP does over a cable that was pulled and put back.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Literal, Self

from pullfill.runtime.lifecycle import stop_listening

Direction = Literal["up", "down"]
_CHUNK = 64 << 10
_RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Listens on 127.0.0.1 (a port the OS picks) and forwards to `target` (host, port).

    A target that cannot be reached closes the client's connection. All methods may be called from
    any thread; each returns when the loop has done it.
    """

    def __init__(self, target: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.target = target
        self.port = 0
        self.accepted = 0
        self._delay_s = 0.0
        self._open = {"up": asyncio.Event(), "down": asyncio.Event()}
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------ life

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._start())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def address(self) -> str:
        """host:port of this end."""
        return f"127.0.0.1:{self.port}"

    # ------------------------------------------------------------------ modes

    def pass_all(self) -> None:
        """Forward at once, both ways. What a blackhole held goes on."""

        def do() -> None:
            self._delay_s = 0.0
            for gate in self._open.values():
                gate.set()

        self._call(do)

    def delay(self, seconds: float) -> None:
        """Each piece, either way, is forwarded so much later."""
        self._call(lambda: setattr(self, "_delay_s", seconds))

    def blackhole(self, *ways: Direction) -> None:
        """Let nothing through, both ways or those named. Connections stand, also new ones."""

        def do() -> None:
            for way in ways or ("up", "down"):
                self._open[way].clear()

        self._call(do)

    def half_open(self) -> None:
        """End the connections to the clients. The target keeps its ends, and hears nothing."""

        def do() -> None:
            for client, target in self._pairs:
                self._held.add(target)
                client.close()

        self._call(do)

    def reset(self) -> None:
        """Both ends of every connection get a RST."""

        def do() -> None:
            for pair in self._pairs:
                for writer in pair:
                    sock: socket.socket = writer.get_extra_info("socket")
                    with contextlib.suppress(OSError):
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    writer.transport.abort()

        self._call(do)

    # ------------------------------------------------------------------ the loop's side

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def _call(self, do: Callable[[], None]) -> None:
        async def work() -> None:
            do()

        self._do(work())

    async def _start(self) -> None:
        self._held: set[asyncio.StreamWriter] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        for gate in self._open.values():
            gate.set()

    async def _stop(self) -> None:
        assert self._server is not None
        await stop_listening(self._server)
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        for writer in self._held:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        me = asyncio.current_task()
        assert me is not None
        self._serving.add(me)
        me.add_done_callback(self._serving.discard)
        self.accepted += 1
        try:
            await self._open["up"].wait()
            target_reader, target_writer = await asyncio.open_connection(*self.target)
        except (OSError, asyncio.CancelledError):
            writer.transport.abort()
            return
        pair = (writer, target_writer)
        self._pairs.add(pair)
        pumps = {
            asyncio.create_task(self._pump("up", reader, target_writer)),
            asyncio.create_task(self._pump("down", target_reader, writer)),
        }
        try:
            await asyncio.wait(pumps)
        except asyncio.CancelledError:
            pass
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._pairs.discard(pair)
            for end in pair:
                if end not in self._held:
                    end.transport.abort()

    async def _pump(
        self, way: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Forward one way until its source ends, then end its sink too."""
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                await self._open[way].wait()
                writer.write(data)
                await writer.drain()
        if writer not in self._held:
            await self._open[way].wait()
            writer.close()
