"""The ZMQ socket where stock servers send heartbeats: a ROUTER, which gets msgpack of DEALERs.

It asks for no key, as its senders have none. So it is bound to loopback unless `--heartbeats` names
another address, and whoever reaches it can name servers, which then get requests.

A task on the frontend's loop reads it, BATCH messages in PAUSE_S seconds at most. What waits is
bounded: WAITING messages for each sender, frames of MAX_BYTES bytes. Nothing is ever sent.

libzmq bounds neither the frames of one message nor the senders. So a hostile sender that reaches
the socket can make it hold memory: another reason for loopback.
"""

from __future__ import annotations

import asyncio
import ipaddress

import zmq
import zmq.asyncio

from pullfill.errors import ConfigError, PullfillError
from pullfill.frontend.forward.heartbeats import MAX_BYTES, MSGPACK, Heartbeats
from pullfill.runtime import log

_log = log.get("frontend.forward")

BATCH = 64
PAUSE_S = 0.05
WAITING = 16


def bind(address: str) -> zmq.Socket[bytes]:
    """Return a bound ROUTER. address: `tcp://HOST:PORT`; port 0: any. Raises ConfigError."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, WAITING)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
    socket.setsockopt(zmq.IPV6, int("[" in address))
    try:
        socket.bind(address)
    except zmq.ZMQError as exc:
        socket.close()
        raise ConfigError(
            f"cannot listen on {address}: {exc.strerror}; choose another --heartbeats"
        ) from None
    return socket


class HeartbeatSocket:
    """See the module. `run` it as a task, `close` it at the end. url: where it listens.

    Raises ConfigError if it cannot listen there."""

    def __init__(self, address: str, heartbeats: Heartbeats) -> None:
        self._heartbeats = heartbeats
        self._socket = zmq.asyncio.Socket.from_socket(bind(address))
        self.url = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        host = self.url.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        _log.info("stock servers may send heartbeats to %s", self.url)
        if not ipaddress.ip_address(host).is_loopback:
            _log.warning(
                "whoever reaches %s can name servers, which then get requests: let only stock "
                "vLLM servers reach it",
                self.url,
            )

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            for _ in range(BATCH):
                frames = await self._socket.recv_multipart()
                # The sender's identity, and what a DEALER sent.
                if len(frames) != 2:
                    self._heartbeats.unreadable(f"{len(frames) - 1} frames instead of 1")
                    continue
                try:
                    self._heartbeats.hear(frames[1], MSGPACK)
                except PullfillError:
                    continue  # counted and logged by `hear`
            # A message that is there already is read without giving way to other tasks.
            await asyncio.sleep(PAUSE_S)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(linger=0)
