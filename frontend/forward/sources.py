"""What names stock servers: `--servers` and heartbeats.

`Servers.set` takes what they name (`StockEntry`). `layer.forwarding` starts them, and is the place
to add another. Single event loop.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import msgspec
import zmq

from pullfill import redact
from pullfill.errors import ConfigError, NotNow
from pullfill.options import Network, check_url
from pullfill.runtime import log

_log = log.get("frontend.forward")

ROLES = ("prefill", "decode")
_SHORT = {"p": "prefill", "d": "decode", "producer": "prefill", "consumer": "decode"}
FORM = "give ROLE=URL[@KV], e.g. prefill=10.0.0.1:8100@10.0.0.1:8998"
# Between two servers of a list. A KV address may have commas, too.
_NEXT = re.compile(r"[\s,]+(?=\w+=)")
MAX_KV = 256
# After a colon comes a port. Anything else may be a password: "http://user:secret@host".
_NO_PORT = re.compile(r":(?!//|\d+(?:[/?@]|$)).*", re.S)


class StockEntry(NamedTuple):
    """One named server. kv: its KV address, in the form of its connector. Empty: none is needed."""

    role: str
    url: str
    kv: str = ""


def parse_list(text: str) -> tuple[StockEntry, ...]:
    """Return the servers of `ROLE=URL[@KV],…`. Raises ConfigError."""
    found: dict[tuple[str, str], StockEntry] = {}
    for part in filter(None, (part.strip(" ,\n") for part in _NEXT.split(text))):
        role, equals, rest = part.partition("=")
        url, _, kv = rest.partition("@")
        if not equals or "," in url or "@" in kv:  # the role of the next server is missing
            raise ConfigError(f"cannot read the server {_shown(part)!r}: {FORM}")
        entry = make(role, url, kv)
        if found.setdefault((entry.role, entry.url), entry) != entry:
            raise ConfigError(f"{entry.url} is named twice, with different KV addresses")
    return tuple(found.values())


def make(role: str, url: str, kv: str = "") -> StockEntry:
    """Return a checked entry. Raises ConfigError.

    role: `prefill` or `decode`, or one of their short names."""
    word = role.strip().lower()
    word = _SHORT.get(word, word)
    if word not in ROLES:
        raise ConfigError(f"no role is called {_shown(role)!r}: use prefill or decode")
    kv = kv.strip()
    if len(kv) > MAX_KV or not kv.isascii() or not kv.isprintable() or " " in kv:
        raise ConfigError(f"{_shown(kv)!r} is no KV address: give HOST:PORT")
    return StockEntry(word, _url(url), kv)


def _url(url: str) -> str:
    """The URL of a server, without a slash at the end."""
    url = url.strip()
    with suppress(ConfigError):  # its text would repeat a password
        found = check_url("", url if "://" in url else f"http://{url}")
        if found and found.isprintable():
            return found
    raise ConfigError(f"{_shown(url)!r} is no address of a server: give http://HOST:PORT")


def _shown(text: str) -> str:
    """Return what an error may repeat: the first 80 characters, without what may be a secret."""
    return redact.url(_NO_PORT.sub(":...", text))[:80]


MAX_BYTES = 4096
# Messages that are read, in 50 ms at most, before other tasks get their turn.
BATCH = 64
# Messages that wait for each sender.
WAITING = 16
# Servers that may send heartbeats.
MAX_SERVERS = 512
# vLLM sends one every 3 s, and its own proxies forget a server after 5.
SILENCE_S = 5.0

_Text = Annotated[str, msgspec.Meta(max_length=512)]


class StockHeartbeat(msgspec.Struct, frozen=True):
    """What vLLM's MoRIIOConnector and P2pNcclConnector send to their proxy every 3 s, as msgpack.

    Other fields are ignored.

    type: `P` (prefill) or `D` (decode). zmq_address: the KV address."""

    type: _Text
    http_address: _Text
    zmq_address: _Text = ""


_heartbeat = msgspec.msgpack.Decoder(StockHeartbeat)


# The socket asks for no key, as its senders have none, and whoever is heard can name servers, which
# then get requests. libzmq bounds neither the frames of one message nor the senders: a hostile one
# could make it hold memory. So it is bound to loopback unless `--heartbeats-from` names networks.
def bind_heartbeats(address: str, networks: Sequence[Network]) -> zmq.Socket[bytes]:
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


@dataclass(slots=True, eq=False)
class Heartbeats:
    """Stock servers that register themselves over ZMQ. `run` it as a task, then close its socket.

    A server is known from its first heartbeat until it has sent none for `silence_s`. Then it
    finishes the requests it has, and gets no more. Its health is looked at as that of any other
    server.

    socket: of `bind_heartbeats`. Nothing is ever sent. networks: of senders on other machines.
    publish: gets all servers that are heard, after each change.
    clock: seconds."""

    socket: zmq.Socket[bytes]
    networks: Sequence[Network]
    publish: Callable[[tuple[StockEntry, ...]], None]
    silence_s: float = SILENCE_S
    clock: Callable[[], float] = time.monotonic
    url: str = field(init=False)
    # Who has sent a heartbeat, by role and URL, and when.
    _heard: dict[tuple[str, str], tuple[StockEntry, float]] = field(default_factory=dict)
    _published: tuple[StockEntry, ...] = ()
    _looked: float = field(init=False)
    _seldom: log.Seldom = field(default_factory=lambda: log.Seldom(60.0))

    def __post_init__(self) -> None:
        self._looked = self.clock()
        self.url = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        _log.info("stock servers may send heartbeats to %s", self.url)

    async def run(self) -> None:
        """Read and look until cancelled."""
        while True:
            for _ in range(BATCH):
                try:
                    # Not copied: only such frames know the sender's address.
                    frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                # The first frame is the sender's identity.
                self.hear(str(frames[0].get("Peer-Address")), [f.bytes for f in frames[1:]])
            self.look()
            await asyncio.sleep(0.05)

    def hear(self, sender: str, frames: Sequence[bytes]) -> None:
        """Note a message. What is not taken is logged now and then.

        sender: its IP address."""
        try:
            address = ipaddress.ip_address(sender)
            # At a socket of IPv6, senders of IPv4 have addresses like ::ffff:10.0.0.1.
            address = getattr(address, "ipv4_mapped", None) or address
            if not (address.is_loopback or any(address in network for network in self.networks)):
                raise ConfigError(
                    f"a heartbeat came from {sender}, which is in no network of --heartbeats-from: "
                    "add it if it is a stock vLLM server"
                )
            beat = _heartbeat.decode(b"".join(frames))
            self._note(make(beat.type, beat.http_address, beat.zmq_address))
        except (ConfigError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            if (more := self._seldom.due(type(exc).__name__)) is not None:
                form = "its fields are type (P or D), http_address and zmq_address"
                _log.warning("a heartbeat is not taken: %s; %s%s", exc, form, more)

    def look(self) -> None:
        """Forget the silent ones, and publish what has changed."""
        now = self.clock()
        # Two looks are further apart if this process was stopped. It heard nobody meanwhile.
        if (stopped := now - self._looked) > 2.0:
            self._heard = {key: (entry, at + stopped) for key, (entry, at) in self._heard.items()}
        self._looked = now
        for key, (_, at) in list(self._heard.items()):
            if now - at > self.silence_s:
                del self._heard[key]
                text = "stock %s server %s has sent no heartbeat for %g s"
                _log.warning(text, *key, self.silence_s)
        entries = tuple(entry for entry, _ in self._heard.values())
        if entries != self._published:
            self._published = entries
            self.publish(entries)

    def _note(self, entry: StockEntry) -> None:
        key = entry.role, entry.url
        if key not in self._heard and len(self._heard) >= MAX_SERVERS:
            raise ConfigError(f"{MAX_SERVERS} servers send heartbeats: no more are taken")
        known, _ = self._heard.get(key, (entry, 0.0))
        # Two servers that share a role and a URL would take turns.
        if known != entry:
            raise ConfigError(
                f"two {entry.role} servers say that they are {entry.url}, with the KV addresses "
                f"{known.kv!r} and {entry.kv!r}: give each its own address"
            )
        self._heard[key] = entry, self.clock()
