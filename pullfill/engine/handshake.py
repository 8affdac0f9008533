"""How a rank's half of a connector tells the main process about its memory: vLLM's own handshake.

vLLM asks every rank's connector for metadata once the KV caches are registered, and gives all of it
to the scheduler's connector, in the main process, before the first request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from pullfill.engine.attention import RankAttention


@dataclass
class RankTold(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a rank tells the main process when it is ready.

    region: a `RankRegion` of the transfer room, opaque here.
    attention: how the rank stores KV."""

    region: Any
    attention: RankAttention
