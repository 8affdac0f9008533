"""vLLM's NixlConnector: the decode server reads the blocks that the prefill server names.

Read from vLLM 0.32, `kv_connector/v1/nixl/pull_scheduler.py`:

- The prefill stage has `do_remote_decode`. The other fields are for a second turn, and None here.
- Its answer has `kv_transfer_params` for the decode stage: `do_remote_prefill`, and where the
  blocks are (`remote_engine_id`, `remote_request_id`, `remote_block_ids`, `remote_host`,
  `remote_port`, `tp_size`). They are passed on as they are: releases add fields.
- The prefill server keeps the blocks until the decode server has read them, or for the time of its
  lease (`kv_lease_duration`, 30 s). So a request that is cancelled between both stages holds blocks
  for that long.
- Each answer of a prefill serves one decode. With used parameters, a decode server reads whatever
  is in the blocks now, and answers 200.
- A decode server that cannot reach the KV address answers 500 after 5 s. In a stream, this is 200
  and an error as its first event.

There is nothing to meet by before the prefill is done: dispatch is serial.
"""

from __future__ import annotations

from typing import Any

from pullfill.frontend.forward.protocol import KvProtocol, Stages
from pullfill.options import Dispatch

_LOCATION = ("remote_block_ids", "remote_engine_id", "remote_host", "remote_port")
"""A decode server whose request lacks one of them ends: vLLM asserts that it is there. It also
needs `remote_request_id`, which older releases neither send nor need."""


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

    def kv_address(self, stages: Stages) -> str:
        told = stages.returned or {}
        return f"{told.get('remote_host')}:{told.get('remote_port')}"

    def lacks(self, stages: Stages) -> str:
        returned = stages.returned
        if not returned:
            return "returned no kv_transfer_params"
        if not returned.get("do_remote_prefill"):
            return "returned kv_transfer_params without do_remote_prefill"
        missing = [name for name in _LOCATION if returned.get(name) is None]
        return f"returned kv_transfer_params without {', '.join(missing)}" if missing else ""

    def empty(self, stages: Stages) -> bool:
        """Older releases send whole blocks only. With none, a decode server of 0.32 ends."""
        blocks = (stages.returned or {}).get("remote_block_ids")
        return isinstance(blocks, list) and all(group == [] for group in blocks)
