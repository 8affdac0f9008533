"""What the connector vLLM constructs must share with the process around it.

vLLM builds connectors itself, from a class name; `install` puts the context where they find it.
One engine per process, so one context per process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pullfill.decode_worker.conditional_router import Situation
from pullfill.errors import ConfigError

if TYPE_CHECKING:
    from pullfill.decode_worker.ledger import Ledger
    from pullfill.decode_worker.request_trace import RequestTraces
    from pullfill.decode_worker.self_check_requests import Trials
    from pullfill.engine.kv import Geometry
    from pullfill.transfer.contract import LocalMemory, Owner, OwnerFences
    from pullfill.transfer.shm.files import RegionFiles
    from pullfill.transfer.shm.owner import FenceOwner
    from pullfill.transfer.shm.ranks import MappedRank
    from pullfill.wire import RouterConfig


@dataclass(slots=True)
class OpenedJob:
    """A job the scheduler side just opened, for the publisher thread to encode and publish."""

    job_id: str
    request_id: str
    token_ids: list[int]
    hit_tokens: int
    blocks: tuple[int, ...]
    cache_salt: str | None
    priority: int
    timeout_s: float
    claim_timeout_s: float


@dataclass(slots=True)
class DecodeContext:
    """What the connector needs from the rest of the process.

    Filled in two steps: identity by main, memory and ledger once the engine has registered its KV
    cache.

    situation: takes (prompt tokens, hit tokens, ineligible) and adds what the process knows about
    workers and queue.
    publish: hands an opened job to the asyncio thread. Must not block.
    queue_full: called when a prompt stays local because of the queue's depth. Must not block.
    files: the files of the KV memory, made before the engine.
    ranks: the memory of each rank, as this process maps it. Empty if no transport reaches it.
    trials: requests of the self-check. None until they can be made.
    offer: opens the fences and the memories to peers.
    """

    instance_id: str
    incarnation: str
    router_config: Callable[[], RouterConfig]
    situation: Callable[[int, int, str], Situation]
    publish: Callable[[OpenedJob], None]
    traces: RequestTraces
    make_ledger: Callable[[OwnerFences], Ledger]
    queue_full: Callable[[], None] = lambda: None
    offer: Callable[[FenceOwner, Sequence[LocalMemory]], Owner | None] = lambda base, _: base
    trials: Trials | None = None
    ledger: Ledger | None = None
    geometry: Geometry | None = None
    files: RegionFiles | None = None
    ranks: list[MappedRank] = field(default_factory=list)
    owner: Owner | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def memories(self) -> list[LocalMemory]:
        """Of all ranks, in order."""
        return [rank.memory for rank in self.ranks]

    def of_a_trial(self, job: OpenedJob) -> bool:
        """Whether the job belongs to the self-check. If so, the self-check sends the job itself."""
        return self.trials is not None and self.trials.publish(job)


_context: DecodeContext | None = None


def install(context: DecodeContext) -> None:
    """Make `context` the one of this process."""
    global _context
    _context = context


def current() -> DecodeContext:
    """The installed context. Raises ConfigError when vLLM was started without pullfill."""
    if _context is None:
        raise ConfigError(
            "the pullfill decode connector works inside `pullfill decode` only: start that"
        )
    return _context
