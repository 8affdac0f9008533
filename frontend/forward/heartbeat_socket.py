"""The ZMQ socket where stock servers send heartbeats: a ROUTER, which gets msgpack of DEALERs.

It asks for no key, as its senders have none, and whoever is heard can name servers, which then get
requests. So it is bound to loopback unless `--heartbeats` names another address, and then only
senders on this machine and in the networks of `--heartbeats-from` are heard.

A task on the frontend's loop reads it, BATCH messages in PAUSE_S seconds at most. What waits is
bounded: WAITING messages for each sender, frames of MAX_BYTES bytes. Nothing is ever sent.

libzmq bounds neither the frames of one message nor the senders. So a hostile sender that reaches
the socket can make it hold memory: another reason for loopback.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence

import zmq
import zmq.asyncio

from pullfill.errors import ConfigError, NotNow, PullfillError
from pullfill.frontend.forward.heartbeats import MAX_BYTES, MSGPACK, Heartbeats
from pullfill.options import Network
from pullfill.runtime import log

_log = log.get("frontend.forward")

BATCH = 64
PAUSE_S = 0.05
WAITING = 16


def bind(address: str, networks: Sequence[Network]) -> zmq.Socket[bytes]:
    """Return a bound ROUTER. address: `tcp://HOST:PORT`; port 0: any.

    Raises ConfigError, also if it can be reached from elsewhere and no `networks` are given."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, WAITING)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
    socket.setsockopt(zmq.IPV6, int("[" in address))
    try:
        socket.bind(address)
    except zmq.ZMQError as exc:
        socket.close()
        raise NotNow(
            f"cannot listen on {address}: {exc.strerror}; choose another --heartbeats"
        ) from None
    host = socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://").rpartition(":")[0]
    if not (networks or ipaddress.ip_address(host.strip("[]")).is_loopback):
        socket.close()
        raise ConfigError(
            f"anybody who reaches {address} could name servers, which then get requests: name the "
            "networks of your stock vLLM servers, e.g. --heartbeats-from 10.0.0.0/24"
        )
    return socket


class HeartbeatSocket:
    """See the module. `run` it as a task, `close` it at the end. url: where it listens.

    networks: of senders on other machines. Raises ConfigError if it cannot listen there."""

    def __init__(
        self, address: str, heartbeats: Heartbeats, networks: Sequence[Network] = ()
    ) -> None:
        self._heartbeats = heartbeats
        self._networks = networks
        self._socket = zmq.asyncio.Socket.from_socket(bind(address, networks))
        self.url = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        _log.info("stock servers may send heartbeats to %s", self.url)

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            for _ in range(BATCH):
                # Not copied: only such frames know the sender's address.
                frames = await self._socket.recv_multipart(copy=False)
                sender = str(frames[0].get("Peer-Address"))
                if not self._heard(sender):
                    self._heartbeats.refused(
                        f"a heartbeat came from {sender}, which is in no network of "
                        "--heartbeats-from: add it if it is a stock vLLM server"
                    )
                    continue
                # The sender's identity, and what a DEALER sent.
                if len(frames) != 2:
                    self._heartbeats.unreadable(f"{len(frames) - 1} frames instead of 1")
                    continue
                try:
                    self._heartbeats.hear(frames[1].bytes, MSGPACK)
                except PullfillError:
                    continue  # counted and logged by `hear`
            # A message that is there already is read without giving way to other tasks.
            await asyncio.sleep(PAUSE_S)

    def _heard(self, sender: str) -> bool:
        address = ipaddress.ip_address(sender)
        # At a socket of IPv6, senders of IPv4 have addresses like ::ffff:10.0.0.1.
        address = getattr(address, "ipv4_mapped", None) or address
        return address.is_loopback or any(address in network for network in self._networks)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(linger=0)
