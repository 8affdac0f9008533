"""What names stock servers: `--servers`, the watched file of `--servers-file`, and heartbeats.

Each source publishes all servers that it knows now (`StockEntry`). `Servers.set` takes them.
Single event loop. A file is read and parsed in a thread, so a slow disk stops no request.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol
from urllib.parse import urlsplit

import msgspec
import yaml
import zmq
import zmq.asyncio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from pullfill import redact
from pullfill.errors import ConfigError, NotNow, OverloadedError, PullfillError
from pullfill.frontend import counters
from pullfill.options import Network
from pullfill.runtime import log
from pullfill.runtime.watched_files import WatchedFiles

_log = log.get("frontend.forward")

# Servers that one source may name.
MAX_SERVERS = 512
ROLES = ("prefill", "decode")
_SHORT = {"p": "prefill", "d": "decode", "producer": "prefill", "consumer": "decode"}
FORM = (
    "give ROLE=URL[@KV], e.g. prefill=10.0.0.1:8100@10.0.0.1:8998. KV addresses with commas need "
    "--servers-file"
)
MAX_KV = 256
# After a colon comes a port. Anything else may be a password: "http://user:secret@host".
_NO_PORT = re.compile(r":(?!//|\d+(?:[/?@]|$)).*", re.S)


@dataclass(frozen=True, slots=True)
class StockEntry:
    """One named server. kv: its KV address, in the form of its connector. Empty: none is needed."""

    role: str
    url: str
    kv: str = ""


def parse_list(text: str) -> tuple[StockEntry, ...]:
    """Return the servers of `ROLE=URL[@KV],…`. Raises ConfigError."""
    found = []
    for part in (p.strip() for p in text.split(",")):
        if not part:
            continue
        role, equals, rest = part.partition("=")
        url, _, kv = rest.partition("@")
        if not equals:
            raise ConfigError(f"cannot read the server {_shown(part)!r}: {FORM}")
        found.append(make(role, url, kv))
    return tuple(dict.fromkeys(found))


def make(role: str, url: str, kv: str = "") -> StockEntry:
    """Return a checked entry. Raises ConfigError."""
    return StockEntry(role_of(role), url_of(url), kv_of(kv))


def role_of(role: str) -> str:
    """Return `prefill` or `decode`. Raises ConfigError."""
    role = role.strip().lower()
    role = _SHORT.get(role, role)
    if role not in ROLES:
        raise ConfigError(f"no role is called {_shown(role)!r}: use prefill or decode")
    return role


def url_of(url: str) -> str:
    """Return the URL of a server, without a slash at the end. Raises ConfigError."""
    url = url.strip().rstrip("/")
    if "://" not in url:
        url = f"http://{url}"
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good, parts = False, urlsplit("")
    if not good or parts.query or parts.fragment or parts.username or not url.isprintable():
        raise ConfigError(f"{_shown(url)!r} is no address of a server: give http://HOST:PORT")
    return url


def kv_of(kv: str) -> str:
    """Return a KV address. Raises ConfigError."""
    kv = kv.strip()
    if len(kv) > MAX_KV or not kv.isascii() or not kv.isprintable() or " " in kv:
        raise ConfigError(f"{_shown(kv)!r} is no KV address: give HOST:PORT")
    return kv


def _shown(text: str) -> str:
    """Return what an error may repeat: the first 80 characters, without what may be a secret."""
    return redact.url(_NO_PORT.sub(":...", text))[:80]


# --------------------------------------------------------------------------- the file


FILE_BYTES = 128 << 10
_CHECKS: dict[str, Callable[[str], str]] = {"role": role_of, "url": url_of, "kv": kv_of}
_FILE_FORM = "give a list of servers, e.g. `- {role: decode, url: http://10.0.0.2:8200}`"


class ServerFile:
    """The watched file of `--servers-file`. `run` it as a task.

        - {role: prefill, url: "http://10.0.0.1:8100", kv: "10.0.0.1:8998"}
        - {role: decode, url: "http://10.0.0.2:8200"}

    A file that is broken or gone changes nothing: the last good servers stay. An empty file counts
    as broken, because many editors and `cp` empty a file before they write it. `[]` means no
    servers.

    publish: gets the servers of the file, at the start and after each change.
    trouble: why the file cannot be used now. Empty: it is used.

    Raises ConfigError if the file cannot be used at the start."""

    def __init__(self, path: str, publish: Callable[[tuple[StockEntry, ...]], None]) -> None:
        self._path = path
        self._publish = publish
        self._watched = WatchedFiles(path)
        self.trouble = ""
        publish(read_file(path))

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self._watched.wait()
            await self._read()

    async def look(self) -> None:
        """Look once, and publish what the file says if it is new."""
        if await self._watched.changed():
            await self._read()

    async def _read(self) -> None:
        try:
            found = await asyncio.to_thread(read_file, self._path)
        except ConfigError as exc:
            self.trouble = f"{exc}; the last good servers stay"
            _log.warning("%s", self.trouble)
        else:
            self.trouble = ""
            _log.info("%s names %d stock servers", self._path, len(found))
            self._publish(found)


def read_file(path: str) -> tuple[StockEntry, ...]:
    """Return the servers of a file. Raises ConfigError."""
    try:
        # Not a pipe or a device: opening or reading one might never end.
        if os.path.exists(path) and not os.path.isfile(path):
            raise ConfigError(f"{path} is no file: give a YAML or JSON file of servers")
        with open(path, "rb") as file:
            data = file.read(FILE_BYTES + 1)
    except OSError as exc:
        raise NotNow(f"cannot read {path} ({exc.strerror}): check --servers-file") from None
    if len(data) > FILE_BYTES:
        raise ConfigError(f"{path} has more than {FILE_BYTES} bytes: name fewer servers")
    try:
        return parse_file(data.decode(), path)
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text: give a YAML or JSON file") from None


def parse_file(text: str, name: str) -> tuple[StockEntry, ...]:
    """Return the servers of a file's text. name: of the file. Raises ConfigError."""
    if text.lstrip().startswith("["):
        text = text.replace("\t", " ")  # JSON may have tabs, YAML may not
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        where = f"{name}, line {mark.line + 1 if mark else 1}"
        raise ConfigError(f"{where}: {exc.problem or 'is not YAML'}: {_FILE_FORM}") from None
    except (yaml.YAMLError, RecursionError) as exc:
        why = (str(exc) or type(exc).__name__).splitlines()[0]
        raise ConfigError(f"{name} is not YAML: {why}") from None
    if root is None:
        raise ConfigError(f"{name}, line 1: the file is empty: give [] if there are no servers")
    if not isinstance(root, yaml.SequenceNode):
        raise ConfigError(f"{_at(name, root)}: {_FILE_FORM}")
    if len(root.value) > MAX_SERVERS:
        raise ConfigError(f"{_at(name, root)}: {MAX_SERVERS} servers at most")
    found: dict[tuple[str, str], tuple[StockEntry, int]] = {}
    for node in root.value:
        entry, line = _entry(name, node), node.start_mark.line + 1
        other, first = found.setdefault((entry.role, entry.url), (entry, line))
        if other is not entry:
            what = "" if other == entry else " with another kv"
            raise ConfigError(
                f"{_at(name, node)}: url: {entry.url} stands in line {first} already{what}"
            )
    return tuple(entry for entry, _ in found.values())


def _entry(name: str, node: yaml.Node) -> StockEntry:
    values = dict(_pairs(name, node))
    for key in ("role", "url"):
        if key not in values:
            raise ConfigError(f"{_at(name, node)}: {key}: the server has none")
    return StockEntry(values["role"], values["url"], values.get("kv", ""))


def _pairs(name: str, node: yaml.Node) -> Iterator[tuple[str, str]]:
    """Yield the checked keys and values of one server. Raises ConfigError."""
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{_at(name, node)}: {_FILE_FORM}")
    seen = set()
    for key, value in node.value:
        word = key.value if isinstance(key, yaml.ScalarNode) else "?"
        where = f"{_at(name, key)}: {word[:40]}"
        if word not in _CHECKS:
            raise ConfigError(f"{where}: no key is called so: use {', '.join(_CHECKS)}")
        if word in seen:
            raise ConfigError(f"{where}: stands here twice")
        seen.add(word)
        if not isinstance(value, yaml.ScalarNode) or not (value.value or word == "kv"):
            raise ConfigError(f"{where}: give one value")
        try:
            yield word, _CHECKS[word](value.value)
        except ConfigError as exc:
            raise ConfigError(f"{where}: {exc}") from None


def _at(name: str, node: yaml.Node) -> str:
    return f"{name}, line {node.start_mark.line + 1}"


# --------------------------------------------------------------------------- heartbeats


HEARTBEAT_PATH = "/pullfill/servers/heartbeat"
MAX_BYTES = 4096
_MAX_LINES = 32

_Text = Annotated[str, msgspec.Meta(max_length=512)]


class StockHeartbeat(msgspec.Struct, frozen=True):
    """What vLLM's MoRIIOConnector and P2pNcclConnector send to their proxy every 3 s: over ZMQ as
    msgpack, over HTTP as JSON. Other fields are ignored.

    type: `P` (prefill) or `D` (decode). zmq_address: the KV address."""

    type: _Text
    http_address: _Text
    zmq_address: _Text = ""


class Decoder(Protocol):
    """msgspec's decoders of JSON and of msgpack."""

    def decode(self, data: bytes, /) -> StockHeartbeat: ...


JSON: Decoder = msgspec.json.Decoder(StockHeartbeat)
MSGPACK: Decoder = msgspec.msgpack.Decoder(StockHeartbeat)


@dataclass(slots=True)
class _Heard:
    entry: StockEntry
    at: float


class Heartbeats:
    """Stock servers that register themselves. `run` it as a task.

    A server is known from its first heartbeat until it has sent none for `silence_s`. Then it
    finishes the requests it has, and gets no more. Its health is looked at as that of any other
    server. Two servers may not share a role and a URL. While one is heard, heartbeats with another
    KV address are refused. So two that contradict each other do not take turns.

    `hear` only notes. A task publishes changes every `publish_s` seconds, so a flood of heartbeats
    costs no more than that.

    publish: gets all servers that are heard, after each change.
    clock: seconds."""

    def __init__(
        self,
        publish: Callable[[tuple[StockEntry, ...]], None],
        silence_s: float,
        clock: Callable[[], float] = time.monotonic,
        publish_s: float = 0.25,
    ) -> None:
        self.silence_s = silence_s
        self._publish = publish
        self._clock = clock
        self._publish_s = publish_s
        self._heard: dict[tuple[str, str], _Heard] = {}
        self._changed = False
        self._looked = clock()
        self._told: set[str] = set()

    def hear(self, data: bytes, decoder: Decoder) -> StockEntry:
        """Note a heartbeat. Returns its server.

        Raises ConfigError if it is bad, OverloadedError if there are too many servers. Each reason
        is counted, and logged once."""
        try:
            beat = self._read(data, decoder)
            entry = make(beat.type, beat.http_address, beat.zmq_address)
            self._note(entry)
        except PullfillError as exc:
            self.refused(str(exc), "unreadable" if isinstance(exc, _Unreadable) else "refused")
            raise
        counters.HEARTBEATS.labels("heard").inc()
        return entry

    def unreadable(self, why: str) -> None:
        """Count a message that is no heartbeat."""
        self.refused(f"cannot read a heartbeat: {why}", "unreadable")

    def refused(self, why: str, result: str = "refused") -> None:
        """Count a message that is not taken, and log each reason once."""
        counters.HEARTBEATS.labels(result).inc()
        if why not in self._told and len(self._told) < _MAX_LINES:
            self._told.add(why)
            _log.warning("%s (said once; pullfill_stock_heartbeats_total counts)", why)

    def look(self) -> None:
        """Forget the silent ones, and publish what has changed."""
        now = self._clock()
        # Two looks are further apart if this process was stopped. It heard nobody meanwhile.
        if (stopped := now - self._looked) > 2.0:
            for heard in self._heard.values():
                heard.at += stopped
        self._looked = now
        for key, heard in list(self._heard.items()):
            if now - heard.at > self.silence_s:
                del self._heard[key]
                self._changed = True
                role, url = key
                _log.warning(
                    "stock %s server %s has sent no heartbeat for %g s", role, url, self.silence_s
                )
        if self._changed:
            self._changed = False
            self._publish(tuple(heard.entry for heard in self._heard.values()))

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(self._publish_s)

    # ---------------------------------------------------------------- inside

    @staticmethod
    def _read(data: bytes, decoder: Decoder) -> StockHeartbeat:
        if len(data) > MAX_BYTES:
            raise _Unreadable(f"cannot read a heartbeat: it has more than {MAX_BYTES} bytes")
        try:
            return decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise _Unreadable(
                f"cannot read a heartbeat: {exc}; send type (P or D), http_address and zmq_address"
            ) from None

    def _note(self, entry: StockEntry) -> None:
        now, key = self._clock(), (entry.role, entry.url)
        heard = self._heard.get(key)
        if heard is None or now - heard.at > self.silence_s:
            if heard is None and len(self._heard) >= MAX_SERVERS:
                raise OverloadedError(
                    f"{MAX_SERVERS} servers send heartbeats, and no more are taken"
                )
            self._heard[key] = _Heard(entry, now)
            self._changed = True
            return
        if heard.entry != entry:
            raise ConfigError(
                f"two {entry.role} servers say that they are {entry.url}, with the KV addresses "
                f"{heard.entry.kv!r} and {entry.kv!r}: give each its own address"
            )
        heard.at = now


class _Unreadable(ConfigError):
    """It is no heartbeat."""


async def answer_heartbeat(
    heartbeats: Heartbeats | None, request: Request, body_s: float = 5.0
) -> Response:
    """Answer `POST /pullfill/servers/heartbeat`. heartbeats: None: stock servers are not used."""
    if heartbeats is None:
        text = "this frontend uses no stock vLLM servers: start it with --forwarder staged or batch"
        return _http_error(409, text)
    data = b""
    try:
        async with asyncio.timeout(body_s):
            async for part in request.stream():
                data += part
                if len(data) > MAX_BYTES:
                    break
        entry = heartbeats.hear(data, JSON)
    except (TimeoutError, ClientDisconnect):
        heartbeats.unreadable("its body did not come")
        return _http_error(408, f"the body did not come within {body_s:g} s")
    except OverloadedError as exc:
        return _http_error(503, str(exc))
    except ConfigError as exc:
        return _http_error(413 if len(data) > MAX_BYTES else 400, str(exc))
    told: dict[str, Any] = {"role": entry.role, "url": entry.url, "kv_address": entry.kv}
    return JSONResponse(told | {"silence_s": heartbeats.silence_s})


def _http_error(status: int, text: str) -> Response:
    error = {"message": text, "type": "BadRequestError", "param": None, "code": status}
    return JSONResponse({"error": error}, status_code=status)


# --------------------------------------------------------------------------- over ZMQ


# The socket asks for no key, as its senders have none, and whoever is heard can name servers, which
# then get requests. libzmq bounds neither the frames of one message nor the senders: a hostile one
# could make it hold memory. So it is bound to loopback unless `--heartbeats-from` names networks.
BATCH = 64
WAITING = 16


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


class HeartbeatSocket:
    """The ROUTER where stock servers send heartbeats. `run` it as a task, `close` it at the end.

    A task reads it, BATCH messages in 50 ms at most. What waits is bounded: WAITING
    messages for each sender, frames of MAX_BYTES bytes. Nothing is ever sent.

    url: where it listens.

    networks: of senders on other machines. Raises ConfigError if it cannot listen there."""

    def __init__(
        self, address: str, heartbeats: Heartbeats, networks: Sequence[Network] = ()
    ) -> None:
        self._heartbeats = heartbeats
        self._networks = networks
        self._socket = zmq.asyncio.Socket.from_socket(bind_heartbeats(address, networks))
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
            await asyncio.sleep(0.05)

    def _heard(self, sender: str) -> bool:
        address = ipaddress.ip_address(sender)
        # At a socket of IPv6, senders of IPv4 have addresses like ::ffff:10.0.0.1.
        address = getattr(address, "ipv4_mapped", None) or address
        return address.is_loopback or any(address in network for network in self._networks)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(linger=0)
