"""What the decode worker's connector, which vLLM constructs, shares with the process around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pullfill.decode_worker.rules import Situation
from pullfill.queue.contract import Urgency
from pullfill.worker.context import LATER, WorkerContext

if TYPE_CHECKING:
    from pullfill.decode_worker.connector_scheduler import ConnectorScheduler
    from pullfill.decode_worker.ledger import Ledger
    from pullfill.decode_worker.request_trace import RequestTraces
    from pullfill.decode_worker.self_check import Trials
    from pullfill.transfer.contract import LocalMemory, Owner, OwnerFences
    from pullfill.transfer.shm.shm_transport import FenceOwner
    from pullfill.wire import Adapter, RouterConfig


@dataclass(slots=True)
class OpenedJob:
    """A job that the connector scheduler just opened, for the publisher to encode and publish.

    features: vLLM's multimodal inputs of the prompt.
    trace: as in `PrefillJob`.
    to: see `Decision`."""

    job_id: str
    request_id: str
    token_ids: list[int]
    hit_tokens: int
    blocks: tuple[int, ...]
    read_from: tuple[int, ...]
    kept_from: tuple[int, ...]
    cache_salt: str | None
    adapter: Adapter | None
    priority: int
    timeout_s: float
    claim_timeout_s: float
    urgency: Urgency = Urgency.NORMAL
    features: Sequence[Any] = ()
    trace: str = ""
    to: str = ""


@dataclass(slots=True, kw_only=True)
class DecodeContext(WorkerContext):
    """What the connector needs from the rest of the process.

    The engine is built before the parts that talk to others. These replace `situation`, `publish`,
    `queue_full` and `wake_control` before the first request comes.

    situation: takes vLLM's Request and the tokens of its local prefix hit, and adds what the
    process knows about workers and queue.
    publish: hands an opened job to the asyncio thread. Must not block.
    queue_full: called when a prompt stays local because of the queue's depth. Must not block.
    wake_control: called when the ledger asks something of the network. Must not block.
    offer: opens the fences and the memories to peers.
    ledger, scheduler: made when vLLM registers the KV cache, and constructs the connector.
    trials: requests of the self-check. None if nothing can be compared.
    """

    incarnation: str
    router_config: Callable[[], RouterConfig]
    situation: Callable[[Any, int], Situation] = LATER
    publish: Callable[[OpenedJob], None] = lambda job: None
    traces: RequestTraces
    make_ledger: Callable[[OwnerFences], Ledger]
    queue_full: Callable[[], None] = lambda: None
    wake_control: Callable[[], None] = lambda: None
    offer: Callable[[FenceOwner, Sequence[LocalMemory]], Owner | None] = lambda base, _: base
    trials: Trials | None = None
    ledger: Ledger = LATER
    scheduler: ConnectorScheduler = LATER
