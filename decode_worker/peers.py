"""What the control server keeps of connected prefill workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from pullfill import alive
from pullfill.channel import Channel
from pullfill.decode_worker.moves import GrantView
from pullfill.decode_worker.reader import PeerReader
from pullfill.wire import Claim, Grant, KvMode, Load


@dataclass(slots=True, eq=False)
class Peer:
    """One connected prefill worker. `name` is unique per connection and is the ledger's writer.

    reader: reads its KV memory, where grants say pull and it can be reached; made when the worker
    connects, ended when it is lost. computes: how it rounds; cleared: whether it may bring KV
    (self_check.py). While it is not `within_reach`, grants do not say pull.
    heard, asked_at: when it said anything, and when it was welcomed or asked for something last, by
    the loop's clock."""

    name: str
    instance_id: str
    channel: Channel
    heard: float
    reader: PeerReader | None = None
    computes: str = ""
    cleared: bool = True
    leaving: bool = False
    pulls: bool = True
    why_not: str = ""
    load: Load = field(default_factory=Load)
    asked_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.asked_at = self.heard

    def patience(self, now: float, silent_s: float) -> float:
        """Seconds for which it may say nothing; `silent_s`: while it asks for things."""
        return alive.patience(now - self.asked_at, silent_s)

    def grant(self, claim: Claim, incarnation: str, grant: GrantView) -> Grant:
        """The answer to its claim."""
        mode = grant.mode
        if mode is KvMode.PULL and (self.reader is None or not self.reader.within_reach()):
            mode = KvMode.PUSH_ASYNC
        return Grant(
            rid=claim.rid,
            job_id=claim.job_id,
            attempt=grant.attempt,
            incarnation=incarnation,
            deadline_s=grant.deadline_s,
            job_digest=grant.digest,
            fence=grant.fence,
            kv_digest=grant.kv_digest,
            mode=mode,
        )


class Peers(dict[str, Peer]):
    """By name. Changed on the asyncio thread; the properties may be read from any."""

    @property
    def instances(self) -> list[str]:
        """Those that may bring KV."""
        return sorted({p.instance_id for p in list(self.values()) if p.cleared})

    @property
    def pulling(self) -> list[Peer]:
        return [p for p in list(self.values()) if p.pulls and not p.leaving]

    @property
    def pool(self) -> int:
        """How many prefill workers pull. In a large cluster most of them are not connected: they
        are told of by those that are, and pull in the same share."""
        peers = list(self.values())
        pulling = sum(peer.pulls and not peer.leaving for peer in peers)
        told = max((peer.load.pool for peer in peers), default=0)
        return max(pulling, told * pulling // len(peers)) if peers else 0

    @property
    def not_pulling(self) -> list[str]:
        """One line for each prefill worker that pulls no jobs."""
        idle = [p for p in list(self.values()) if not p.pulls]
        return [f"{p.instance_id} pulls no jobs: {p.why_not or 'no reason given'}" for p in idle]
