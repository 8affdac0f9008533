"""What the control server keeps of one connected prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from pullfill.channel import Channel
from pullfill.decode_worker.reader import PeerReader


@dataclass(slots=True, eq=False)
class Peer:
    """One connected prefill worker. `name` is unique per connection and is the ledger's writer.

    reader: reads its KV memory, where grants say pull and it can be reached; made when the worker
    connects, ended when it is lost. While it is not `within_reach`, grants do not say pull."""

    name: str
    instance_id: str
    channel: Channel
    heard: float
    reader: PeerReader | None = None
    leaving: bool = False
    pulls: bool = True
