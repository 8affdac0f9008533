"""What the control server stores about connected prefill workers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec

from pullfill.decode_worker.kv_reader import KvReader
from pullfill.net.channel import Channel
from pullfill.wire import Grant, Hello, KvMode, Load


@dataclass(slots=True, eq=False)
class Peer:
    """One connected prefill worker. `name` is unique per connection and is the ledger's writer."""

    name: str
    hello: Hello
    channel: Channel
    heard: float  # when the last message came, by the loop's clock
    # Reads the worker's KV memory in pull mode, if it can be reached. Made when the worker
    # connects, closed when it is lost.
    reader: KvReader | None = None
    leaving: bool = False
    # Why it pulls no jobs of this decode worker. Empty: it pulls.
    why_not: str = ""
    load: Load = field(default_factory=Load)
    told: float = 0.0  # when the load was told, by the loop's clock, which is monotonic

    @property
    def instance_id(self) -> str:
        return self.hello.prefill_instance

    def done_tokens(self) -> float:
        """Tokens of open jobs that it has computed by now, if it goes on as it did. Any thread."""
        return self.load.done_tokens + self.load.tokens_per_s * (time.monotonic() - self.told)

    def in_reach(self, grant: Grant) -> Grant:
        """Return the grant, without `pull` if we cannot read this worker's memory."""
        reads = self.reader is not None and self.reader.within_reach
        if grant.mode is KvMode.PULL and not reads:
            return msgspec.structs.replace(grant, mode=KvMode.PUSH_ASYNC)
        return grant


class Peers(dict[str, Peer]):
    """Peers by name. Change it on the asyncio thread. Any thread may read the properties."""

    @property
    def instances(self) -> list[str]:
        """Instance ids of those that are connected."""
        return sorted({p.instance_id for p in list(self.values())})

    @property
    def pulling(self) -> list[Peer]:
        return [p for p in list(self.values()) if not (p.why_not or p.leaving)]

    @property
    def not_pulling(self) -> list[str]:
        """One line for each prefill worker that pulls no jobs."""
        idle = [p for p in list(self.values()) if p.why_not]
        return [f"{p.instance_id} pulls no jobs: {p.why_not}" for p in idle]
