"""A TCP proxy that tests break on purpose: blackhole and reset, at run time.

An asyncio loop in a thread of its own. Each connection is two pumps. Every mode acts on connections
that are open already as well as on new ones. No byte is lost while a connection stands: what falls
into a blackhole waits in the sockets, and goes on with `pass_all`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self

from pullfill.runtime.lifecycle import stop_listening

_CHUNK = 64 << 10
_RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Listens at `address` (host:port, which the OS picks) and forwards to `target` (host, port).

    A target that cannot be reached closes the client's connection. All methods may be called from
    any thread; each returns when the loop has done it.
    """

    def __init__(self, target: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.target = target
        self.address = ""
        self.accepted = 0
        self._open = asyncio.Event()
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._serving: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------ life

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    # ------------------------------------------------------------------ modes

    def pass_all(self) -> None:
        """Forward at once, both ways. What a blackhole held goes on."""
        self._call(self._open.set)

    def blackhole(self) -> None:
        """Let nothing through. Connections stand, also new ones."""
        self._call(self._open.clear)

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
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._open.set()

    async def _stop(self) -> None:
        await stop_listening(self._server)
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        me = asyncio.current_task()
        self._serving.add(me)
        me.add_done_callback(self._serving.discard)
        self.accepted += 1
        try:
            await self._open.wait()
            target_reader, target_writer = await asyncio.open_connection(*self.target)
        except (OSError, asyncio.CancelledError):
            writer.transport.abort()
            return
        pair = (writer, target_writer)
        self._pairs.add(pair)
        pumps = self._pump(reader, target_writer), self._pump(target_reader, writer)
        try:
            await asyncio.gather(*pumps)
        except asyncio.CancelledError:
            pass
        finally:
            self._pairs.discard(pair)
            for end in pair:
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one way until its source ends, then end its sink too."""
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        await self._open.wait()
        writer.close()
