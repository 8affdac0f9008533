"""Connectors that read their peer's address in the request id: vLLM's P2pNcclConnector, MoRI-IO.

The id is `___prefill_addr_A___decode_addr_B_HEX`, in the header `X-Request-Id` of both stages. vLLM
0.32 reads it in `kv_connector/v1/moriio/moriio_common.py`; A and B are the servers' KV addresses,
which they tell in their heartbeats. P2pNcclConnector is in vLLM up to 0.10 and in its forks.

MoRI-IO reads `transfer_id` and the direction in `kv_transfer_params`, too, and in its READ mode the
decode server needs what the prefill server returned. P2pNcclConnector ignores the parameters.

- serial: for connectors that keep or return blocks (MoRI-IO READ).
- parallel: the prefill server pushes, and the decode server waits (MoRI-IO WRITE, P2pNccl PUT).
- single: the decode server alone has the request, and starts the prefill itself.

A decode server takes the KV of each prompt to be elsewhere, so no request comes without a prefill:
P2pNcclConnector would wait for the KV without end, and MoRI-IO READ would decode without it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from pullfill.frontend.forward.protocol import Get, KvProtocol, Stages
from pullfill.frontend.forward.servers import Server
from pullfill.options import Dispatch

ANSWER_S = 3.0


class P2p(KvProtocol):
    name = "p2p"
    connector = "P2pNcclConnector or MoRIIOConnector"
    dispatches = (Dispatch.SERIAL, Dispatch.PARALLEL, Dispatch.SINGLE)
    pairs = True
    alone = False

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

    def needs(self, role: str) -> str:
        return "its KV address"

    async def check(self, server: Server, get: Get) -> str:
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
