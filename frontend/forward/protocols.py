"""What stock vLLM's KV connectors need of a proxy: one small class for each.

A protocol says what is in the bodies of both stages, whether both can start at once, and whether
the servers must be known to each other before. It sends no requests itself. It only tries whether
a KV address answers (`check`).
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import aiohttp

from pullfill.errors import ConfigError
from pullfill.frontend.forward.servers import ANSWER_S, Server

# Asks an address over HTTP. Raises what aiohttp raises, or ValueError.
Get = Callable[[str], Awaitable[bytes]]


@dataclass(slots=True)
class Stages:
    """One attempt at one request.

    key: 32 hex digits, new for each attempt. Connectors that meet by an id meet by this one.
    prefill, decode: the servers. decode may be None until the prefill is done.
    returned: `kv_transfer_params` of the prefill server's answer."""

    key: str
    prefill: Server
    decode: Server | None = None
    returned: dict[str, Any] | None = None


class KvProtocol(ABC):
    """One connector.

    name: for `--protocol`. connector: its name in vLLM, for messages.
    parallel: whether both stages can start at once.
    pairs: each request names both servers. So both are chosen at once, and none can come without a
    prefill stage."""

    name: ClassVar[str]
    connector: ClassVar[str]
    parallel: ClassVar[bool] = True
    pairs: ClassVar[bool] = False

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

    async def check(self, server: Server, get: Get) -> str:
        """Return what is wrong with a server's KV address. Empty: nothing, as far as one can see.

        Called before the server gets requests."""
        return ""


# A decode server whose request lacks one of them ends: vLLM asserts that it is there. It also
# needs `remote_request_id`, which older releases neither send nor need.
_NIXL_LOCATION = ("remote_block_ids", "remote_engine_id", "remote_host", "remote_port")


# vLLM's NixlConnector: the decode server reads the blocks that the prefill server names.
#
# Read from vLLM 0.32, `kv_connector/v1/nixl/pull_scheduler.py`:
#
# - The prefill stage has `do_remote_decode`. The other fields are for a second turn, and None here.
# - Its answer has `kv_transfer_params` for the decode stage: `do_remote_prefill`, and where the
#   blocks are (`remote_engine_id`, `remote_request_id`, `remote_block_ids`, `remote_host`,
#   `remote_port`, `tp_size`). They are passed on as they are: releases add fields.
# - The prefill server keeps the blocks until the decode server has read them, or for the time of
#   its lease (`kv_lease_duration`, 30 s). So a request that is cancelled between both stages holds
#   blocks for that long.
# - Each answer of a prefill serves one decode. With used parameters, a decode server reads whatever
#   is in the blocks now, and answers 200.
# - A decode server that cannot reach the KV address answers 500 after 5 s. In a stream, this is 200
#   and an error as its first event.
#
# There is nothing to meet by before the prefill is done.
class Nixl(KvProtocol):
    name = "nixl"
    connector = "NixlConnector"
    parallel = False

    def prefill(self, stages: Stages) -> dict[str, Any]:
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }

    def decode(self, stages: Stages) -> dict[str, Any]:
        return stages.returned or {}

    def kv_address(self, stages: Stages) -> str:
        told = stages.returned or {}
        return f"{told.get('remote_host')}:{told.get('remote_port')}"

    def lacks(self, stages: Stages) -> str:
        returned = stages.returned
        if not returned:
            return "returned no kv_transfer_params"
        if not returned.get("do_remote_prefill"):
            return "returned kv_transfer_params without do_remote_prefill"
        missing = [name for name in _NIXL_LOCATION if returned.get(name) is None]
        return f"returned kv_transfer_params without {', '.join(missing)}" if missing else ""

    def empty(self, stages: Stages) -> bool:
        """Older releases send whole blocks only. With none, a decode server of 0.32 ends."""
        blocks = (stages.returned or {}).get("remote_block_ids")
        return isinstance(blocks, list) and all(group == [] for group in blocks)


# vLLM's MooncakeConnector: both servers meet by a transfer id.
#
# Read from vLLM 0.32, `kv_connector/v1/mooncake/mooncake_connector.py`:
#
# - The prefill stage has `do_remote_decode` and `transfer_id`. Its answer has no parameters.
# - The decode stage has `do_remote_prefill`, the same `transfer_id`, `remote_engine_id`, and the
#   address of the prefill server's bootstrap service, `remote_bootstrap_addr`. The decode server
#   asks there which workers to read from, and waits until the prefill is done.
# - `GET /query` of the bootstrap service names the engine of each data-parallel rank. Servers with
#   more than one rank are addressed by rank 0 only.
#
# So both stages can start at once. The KV address of a prefill server is its bootstrap service
# (`VLLM_MOONCAKE_BOOTSTRAP_PORT`, 8998 unless set).
class Mooncake(KvProtocol):
    name = "mooncake"
    connector = "MooncakeConnector"

    def prefill(self, stages: Stages) -> dict[str, Any]:
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": f"xfer-{stages.key}",
        }

    def decode(self, stages: Stages) -> dict[str, Any]:
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": stages.prefill.engine_id,
            "remote_bootstrap_addr": stages.prefill.kv_url,
            "transfer_id": f"xfer-{stages.key}",
        }

    async def check(self, server: Server, get: Get) -> str:
        """Also learn what the bootstrap service calls the prefill server's engine."""
        if server.role != "prefill":
            return ""
        if not server.kv:
            return "register it with its bootstrap address as KV address"
        try:
            ranks = json.loads(await get(server.kv_url + "/query"))
            server.engine_id = str(ranks[min(ranks, key=int)]["engine_id"])
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            text = str(exc) or type(exc).__name__
            return (
                f"nobody answers at its KV address {server.kv} ({text}): register it with the "
                "address of its bootstrap service (VLLM_MOONCAKE_BOOTSTRAP_PORT)"
            )
        except (KeyError, TypeError, ValueError):
            return (
                f"what answers at its KV address {server.kv} is no Mooncake bootstrap service: "
                "register it with the address of that (VLLM_MOONCAKE_BOOTSTRAP_PORT)"
            )
        return ""


# Connectors that read their peer's address in the request id: vLLM's P2pNcclConnector, MoRI-IO.
#
# The id is `___prefill_addr_A___decode_addr_B_HEX`, in the header `X-Request-Id` of both stages.
# vLLM 0.32 reads it in `kv_connector/v1/moriio/moriio_common.py`. A and B are the servers' KV
# addresses, which they tell in their heartbeats. P2pNcclConnector is in vLLM up to 0.10 and in its
# forks.
#
# MoRI-IO reads `transfer_id` and the direction in `kv_transfer_params`, too, and in its READ mode
# the decode server needs what the prefill server returned. P2pNcclConnector ignores the parameters.
#
# - staged: for connectors that keep or return blocks (MoRI-IO READ).
# - parallel: the prefill server pushes, and the decode server waits (MoRI-IO WRITE, P2pNccl PUT).
#
# A decode server takes the KV of each prompt to be elsewhere: no request comes without a prefill.
# P2pNcclConnector would wait for the KV without end, and MoRI-IO READ would decode without it.
class P2p(KvProtocol):
    name = "p2p"
    connector = "P2pNcclConnector or MoRIIOConnector"
    pairs = True

    def request_id(self, stages: Stages, request_id: str) -> str:
        assert stages.decode is not None
        return f"___prefill_addr_{stages.prefill.kv}___decode_addr_{stages.decode.kv}_{stages.key}"

    def prefill(self, stages: Stages) -> dict[str, Any]:
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": f"tx-{stages.key}",
            # MoRI-IO WRITE ends the engine without them, and fills them in itself.
            "remote_engine_id": None,
            "remote_block_ids": None,
        }

    def decode(self, stages: Stages) -> dict[str, Any]:
        return {
            **(stages.returned or {}),
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": f"tx-{stages.key}",
        }

    async def check(self, server: Server, get: Get) -> str:
        if not server.kv:
            return "register it with its KV address"
        found = listens_at(server.kv)
        if found is None:
            form = "HOST:PORT, or host:IP,handshake:PORT,notify:PORT for MoRI-IO"
            return f"cannot read its KV address {server.kv!r}: register it with {form}"
        try:
            async with asyncio.timeout(ANSWER_S):
                _, writer = await asyncio.open_connection(*found)
        except (OSError, TimeoutError) as exc:
            text = str(exc) or type(exc).__name__
            return (
                f"nobody answers at its KV address {server.kv} ({text}): register it with the "
                f"address where its connector listens ({self.connector})"
            )
        writer.close()
        return ""


def listens_at(kv: str) -> tuple[str, int] | None:
    """Return host and port of a KV address. None: it cannot be read."""
    if "," in kv:  # MoRI-IO reads three values, and ends its engine if one is missing
        parts = dict(part.strip().partition(":")[::2] for part in kv.split(","))
        host, port = parts.get("host", ""), parts.get("handshake", "")
        if not parts.get("notify", "").isdecimal():
            return None
    else:
        host, _, port = kv.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        return None
    return host, int(port)


def protocol_of(name: str) -> KvProtocol:
    """Return the protocol of this name. Raises ConfigError."""
    known: dict[str, type[KvProtocol]] = {each.name: each for each in (Nixl, Mooncake, P2p)}
    if name not in known:
        raise ConfigError(f"no protocol is called {name!r}: use one of {', '.join(known)}")
    return known[name]()
