"""Calls an engine utility (reset_prefix_cache, profile, …) on every decode worker at once.

A call ends when each worker has answered, at its deadline, or when a worker is lost. Event loop
only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from pullfill.engine import front_wire
from pullfill.errors import PeerUnavailable
from pullfill.frontend.decode_connection import DecodeConnection


class Calls:
    """Utility calls that wait for answers. codec: as in `dispatch.Dispatcher`."""

    def __init__(self, codec: Any) -> None:
        self._codec = codec
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, tuple[DecodeConnection, asyncio.Future[Any]]] = {}
        self._next_id = 1

    async def call(
        self,
        connections: Sequence[DecodeConnection],
        method: str,
        args: Sequence[Any],
        timeout_s: float,
    ) -> list[Any]:
        """Return one result per connection, in no order.

        Raises PeerUnavailable: no answer in time, a worker was lost, or it reported a failure."""
        futures: list[asyncio.Future[Any]] = []
        ids: list[int] = []
        for connection in connections:
            call_id, self._next_id = self._next_id, self._next_id + 1
            future = self._loop.create_future()
            self._open[call_id] = (connection, future)
            connection.send(front_wire.UTIL, *self._codec.encode((call_id, method, tuple(args))))
            futures.append(future)
            ids.append(call_id)
        try:
            async with asyncio.timeout(timeout_s):
                return list(await asyncio.gather(*futures))
        except TimeoutError:
            raise PeerUnavailable(f"{method}: no answer within {timeout_s:g} s") from None
        finally:
            for call_id in ids:
                self._open.pop(call_id, None)

    def on_lost(self, connection: DecodeConnection, reason: str) -> None:
        """Fail the calls of a connection that is gone."""
        for other, future in list(self._open.values()):
            if other is connection and not future.done():
                future.set_exception(
                    PeerUnavailable(f"decode worker {connection.instance_id}: {reason}")
                )

    def on_result(self, connection: DecodeConnection, result: Any) -> None:
        """Take vLLM's UtilityOutput from a worker. An answer for another worker is ignored."""
        owner, future = self._open.get(result.call_id, (None, None))
        if future is None or owner is not connection or future.done():
            return
        if result.failure_message is not None:
            future.set_exception(
                PeerUnavailable(f"decode worker {connection.instance_id}: {result.failure_message}")
            )
        else:
            future.set_result(None if result.result is None else result.result.result)
