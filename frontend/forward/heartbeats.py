"""Stock servers that register themselves by heartbeats, over HTTP or ZMQ.

A heartbeat is what vLLM's MoRIIOConnector and P2pNcclConnector send to their proxy every 3 s. Over
ZMQ it is msgpack (`heartbeat_socket`), over HTTP the same map as JSON:

    {"type": "P", "http_address": "10.0.0.1:8100", "zmq_address": "10.0.0.1:8998"}

type: `P` (prefill) or `D` (decode). zmq_address: the KV address. Other fields are ignored.

A server is known from its first heartbeat until it has sent none for `silence_s`. Then it finishes
the requests it has, and gets no more. Its health is looked at as that of any other server.

Two servers may not share a role and a URL. While one is heard, heartbeats with another KV address
are refused. So two that contradict each other do not take turns.

`hear` only notes. A task publishes changes every LOOK_S seconds, so a flood of heartbeats costs no
more than that. At most MAX_SERVERS servers are kept, and a heartbeat has MAX_BYTES bytes at most.
Single event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from pullfill.errors import ConfigError, OverloadedError, PullfillError
from pullfill.frontend import counters
from pullfill.frontend.forward.entries import Entry, make
from pullfill.runtime import log

_log = log.get("frontend.forward")

PATH = "/pullfill/servers/heartbeat"
MAX_BYTES = 4096
MAX_SERVERS = 512
LOOK_S = 0.25
STOPPED_S = 2.0
"""If two looks are further apart, this process was stopped, and heard nobody meanwhile."""
BODY_S = 5.0
_MAX_LINES = 32

_Text = Annotated[str, msgspec.Meta(max_length=512)]


class Heartbeat(msgspec.Struct, frozen=True):
    """One message. Other fields are ignored: connectors send more."""

    type: _Text
    http_address: _Text
    zmq_address: _Text = ""


class Decoder(Protocol):
    """msgspec's decoders of JSON and of msgpack."""

    def decode(self, data: bytes, /) -> Heartbeat: ...


JSON: Decoder = msgspec.json.Decoder(Heartbeat)
MSGPACK: Decoder = msgspec.msgpack.Decoder(Heartbeat)


@dataclass(slots=True)
class _Heard:
    entry: Entry
    at: float


class Heartbeats:
    """See the module. `run` it as a task.

    publish: gets all servers that are heard, after each change.
    clock: seconds."""

    def __init__(
        self,
        publish: Callable[[tuple[Entry, ...]], None],
        silence_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.silence_s = silence_s
        self._publish = publish
        self._clock = clock
        self._heard: dict[tuple[str, str], _Heard] = {}
        self._changed = False
        self._looked = clock()
        self._told: set[str] = set()

    def hear(self, data: bytes, decoder: Decoder) -> Entry:
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
        if (stopped := now - self._looked) > STOPPED_S:
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
            await asyncio.sleep(LOOK_S)

    # ---------------------------------------------------------------- inside

    @staticmethod
    def _read(data: bytes, decoder: Decoder) -> Heartbeat:
        if len(data) > MAX_BYTES:
            raise _Unreadable(f"cannot read a heartbeat: it has more than {MAX_BYTES} bytes")
        try:
            return decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise _Unreadable(
                f"cannot read a heartbeat: {exc}; send type (P or D), http_address and zmq_address"
            ) from None

    def _note(self, entry: Entry) -> None:
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


async def answer(heartbeats: Heartbeats | None, request: Request) -> Response:
    """Answer `POST /pullfill/servers/heartbeat`. heartbeats: None: stock servers are not used."""
    if heartbeats is None:
        text = "this frontend uses no stock vLLM servers: start it with --forwarder staged or batch"
        return _error(409, text)
    data = b""
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                data += part
                if len(data) > MAX_BYTES:
                    break
        entry = heartbeats.hear(data, JSON)
    except (TimeoutError, ClientDisconnect):
        heartbeats.unreadable("its body did not come")
        return _error(408, f"the body did not come within {BODY_S:g} s")
    except OverloadedError as exc:
        return _error(503, str(exc))
    except ConfigError as exc:
        return _error(413 if len(data) > MAX_BYTES else 400, str(exc))
    told: dict[str, Any] = {"role": entry.role, "url": entry.url, "kv_address": entry.kv}
    return JSONResponse(told | {"silence_s": heartbeats.silence_s})


def _error(status: int, text: str) -> Response:
    error = {"message": text, "type": "BadRequestError", "param": None, "code": status}
    return JSONResponse({"error": error}, status_code=status)
