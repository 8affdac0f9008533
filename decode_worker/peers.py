"""What the control server keeps of one connected prefill worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from pullfill import alive
from pullfill.channel import Channel
from pullfill.decode_worker.reader import PeerReader


@dataclass(slots=True, eq=False)
class Peer:
    """One connected prefill worker. `name` is unique per connection and is the ledger's writer.

    reader: reads its KV memory, where grants say pull and it can be reached; made when the worker
    connects, ended when it is lost. While it is not `within_reach`, grants do not say pull.
    heard, asked_at: when it said anything, and when it was welcomed or asked for something last, by
    the loop's clock."""

    name: str
    instance_id: str
    channel: Channel
    heard: float
    reader: PeerReader | None = None
    leaving: bool = False
    pulls: bool = True
    why_not: str = ""
    asked_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.asked_at = self.heard

    def patience(self, now: float, silent_s: float) -> float:
        """Seconds for which it may say nothing; `silent_s`: while it asks for things."""
        return alive.patience(now - self.asked_at, silent_s)
