"""What stock vLLM's KV connectors need of a proxy: one small class for each.

A protocol says what is in the bodies of both stages, which orders of dispatch its connector can
work with, whether the servers must be known to each other before the prefill starts, and whether a
request may come without a prefill stage. It sends no requests itself. It only tries whether a KV
address answers (`check`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from pullfill.errors import ConfigError
from pullfill.frontend.forward.servers import Server
from pullfill.options import Dispatch, ForwarderName

Get = Callable[[str], Awaitable[bytes]]
"""Asks an address over HTTP. Raises what aiohttp raises, or ValueError."""


@dataclass(slots=True)
class Stages:
    """One attempt at one request.

    key: 32 hex digits, new for each attempt. Connectors that meet by an id meet by this one.
    prefill, decode: the servers. With `staged`, decode is None until the prefill is done.
    returned: `kv_transfer_params` of the prefill server's answer."""

    key: str
    prefill: Server
    decode: Server | None = None
    returned: dict[str, Any] | None = None


class KvProtocol(ABC):
    """One connector.

    name: for `--protocol`. connector: its name in vLLM, for messages.
    dispatches: orders of dispatch that it can work with, its usual one first.
    pairs: whether the request of the prefill stage names both servers.
    alone: whether a decode server can serve a request that had no prefill stage.
    """

    name: ClassVar[str]
    connector: ClassVar[str]
    dispatches: ClassVar[tuple[Dispatch, ...]]
    pairs: ClassVar[bool] = False
    alone: ClassVar[bool] = True

    @property
    def start_with(self) -> str:
        """What to do about a server without the connector, for people."""
        how = f"a kv_connector for the protocol {self.name} ({self.connector})"
        return f"start it with --kv-transfer-config and {how}"

    @abstractmethod
    def prefill(self, stages: Stages) -> dict[str, Any]:
        """Return `kv_transfer_params` of the prefill stage."""

    @abstractmethod
    def decode(self, stages: Stages) -> dict[str, Any]:
        """Return `kv_transfer_params` of the decode stage."""

    def request_id(self, stages: Stages, request_id: str) -> str:
        """Return the `X-Request-Id` of both stages. request_id: of the call."""
        return request_id

    def kv_address(self, stages: Stages) -> str:
        """Return where the decode server reads the KV, for messages."""
        return stages.prefill.kv

    def lacks(self, stages: Stages) -> str:
        """Return what is wrong with a prefill server's answer. Empty: nothing."""
        return ""

    def empty(self, stages: Stages) -> bool:
        """Return whether the prefill has left no KV to read, e.g. of a very short prompt."""
        return False

    def needs(self, role: str) -> str:
        """Return what a server of this role must be registered with. Empty: its URL only."""
        return ""

    async def check(self, server: Server, get: Get) -> str:
        """Return what is wrong with a server's KV address. Empty: nothing, as far as one can see.

        Called before the server gets requests."""
        return ""


def protocol_of(name: str) -> KvProtocol:
    """Return the protocol of this name. Raises ConfigError."""
    from pullfill.frontend.forward.mooncake import Mooncake
    from pullfill.frontend.forward.nixl import Nixl
    from pullfill.frontend.forward.p2p import P2p

    known: dict[str, type[KvProtocol]] = {"nixl": Nixl, "mooncake": Mooncake, "p2p": P2p}
    if name not in known:
        raise ConfigError(f"no protocol is called {name!r}: use one of {', '.join(known)}")
    return known[name]()


def dispatch_of(protocol: KvProtocol, forwarder: ForwarderName, asked: Dispatch | None) -> Dispatch:
    """Return the order of dispatch to use. Raises ConfigError if the protocol cannot."""
    can = protocol.dispatches
    if forwarder is ForwarderName.STAGED:
        if asked not in (None, Dispatch.SERIAL):
            raise ConfigError(
                f"--dispatch {asked} is for `--forwarder batch`: `staged` chooses the decode "
                "server when the prefill is done"
            )
        if protocol.pairs:
            raise ConfigError(
                f"--forwarder staged cannot use the protocol {protocol.name}: its prefill server "
                "must know the decode server from the beginning; use --forwarder batch"
            )
        asked = Dispatch.SERIAL
    if asked is not None and asked not in can:
        raise ConfigError(
            f"the protocol {protocol.name} has no --dispatch {asked}: use {', '.join(can)}"
        )
    return asked or can[0]
