"""Connectors that read their peer's address in the request id: vLLM's P2pNcclConnector, MoRI-IO.

The id is `___prefill_addr_A___decode_addr_B_HEX`, in the header `X-Request-Id` of both stages. vLLM
0.32 reads it in `kv_connector/v1/moriio/moriio_common.py`; A and B are the servers' KV addresses,
which they tell in their heartbeats. P2pNcclConnector is in vLLM up to 0.10 and in its forks.

MoRI-IO reads `transfer_id` and the direction in `kv_transfer_params`, too, and in its READ mode the
decode server needs what the prefill server returned. P2pNcclConnector ignores the parameters.

- serial: for connectors that keep or return blocks (MoRI-IO READ).
- parallel: the prefill server pushes, and the decode server waits (MoRI-IO WRITE, P2pNccl PUT).
- single: the decode server alone has the request, and starts the prefill itself.
"""

from __future__ import annotations

from typing import Any

from pullfill.frontend.forward.protocol import KvProtocol, Stages
from pullfill.options import Dispatch


class P2p(KvProtocol):
    name = "p2p"
    connector = "P2pNcclConnector or MoRIIOConnector"
    dispatches = (Dispatch.SERIAL, Dispatch.PARALLEL, Dispatch.SINGLE)
    pairs = True

    def request_id(self, stages: Stages, request_id: str) -> str:
        assert stages.decode is not None
        return f"___prefill_addr_{stages.prefill.kv}___decode_addr_{stages.decode.kv}_{stages.key}"

    def prefill(self, stages: Stages) -> dict[str, Any]:
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": f"tx-{stages.key}",
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
