"""vLLM's NixlConnector: the decode server reads the blocks that the prefill server names.

Read from vLLM 0.32, `kv_connector/v1/nixl/pull_scheduler.py`:

- The prefill stage has `do_remote_decode`. The other fields are for a second turn, and None here.
- Its answer has `kv_transfer_params` for the decode stage: `do_remote_prefill`, and where the
  blocks are (`remote_engine_id`, `remote_request_id`, `remote_block_ids`, `remote_host`,
  `remote_port`, `tp_size`). They are passed on as they are: releases add fields.
- The prefill server keeps the blocks until the decode server has read them, or for the time of its
  lease. So a request that is cancelled between both stages holds blocks for that long.

There is nothing to meet by before the prefill is done: dispatch is serial.
"""

from __future__ import annotations

from typing import Any

from pullfill.frontend.forward.protocol import KvProtocol, Stages
from pullfill.options import Dispatch

_LOCATION = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class Nixl(KvProtocol):
    name = "nixl"
    connector = "NixlConnector"
    dispatches = (Dispatch.SERIAL,)

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

    def lacks(self, stages: Stages) -> str:
        returned = stages.returned
        if not returned:
            return "returned no kv_transfer_params"
        if not returned.get("do_remote_prefill"):
            return "returned kv_transfer_params without do_remote_prefill"
        missing = [name for name in _LOCATION if returned.get(name) is None]
        return f"returned kv_transfer_params without {', '.join(missing)}" if missing else ""
