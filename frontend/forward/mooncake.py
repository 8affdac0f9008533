"""vLLM's MooncakeConnector: both servers meet by a transfer id.

Read from vLLM 0.32, `kv_connector/v1/mooncake/mooncake_connector.py`:

- The prefill stage has `do_remote_decode` and `transfer_id`. Its answer has no parameters.
- The decode stage has `do_remote_prefill`, the same `transfer_id`, `remote_engine_id`, and the
  address of the prefill server's bootstrap service, `remote_bootstrap_addr`. The decode server
  asks there which workers to read from, and waits until the prefill is done.
- `GET /query` of the bootstrap service names the engine of each data-parallel rank. Servers with
  more than one rank are addressed by rank 0 only.

So both stages can start at once. The KV address of a prefill server is its bootstrap service
(`VLLM_MOONCAKE_BOOTSTRAP_PORT`, 8998 unless set).
"""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from pullfill.frontend.forward.protocol import Get, KvProtocol, Stages
from pullfill.frontend.forward.servers import Server
from pullfill.options import Dispatch


class Mooncake(KvProtocol):
    name = "mooncake"
    connector = "MooncakeConnector"
    dispatches = (Dispatch.PARALLEL, Dispatch.SERIAL)

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

    def needs(self, role: str) -> str:
        return "its bootstrap address as KV address" if role == "prefill" else ""

    async def check(self, server: Server, get: Get) -> str:
        """Also learn what the bootstrap service calls the prefill server's engine."""
        if server.role != "prefill":
            return ""
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
