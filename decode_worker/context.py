"""What the parts of a decode side share, and what they share with vLLM's connector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pullfill.worker.context import LATER, WorkerContext

if TYPE_CHECKING:
    from pullfill.decode_worker.ledger import Ledger
    from pullfill.decode_worker.request_trace import RequestTraces
    from pullfill.decode_worker.scheduler import DecodeScheduler, JobBlocks
    from pullfill.wire import RouterConfig


@dataclass(slots=True, kw_only=True)
class ConnectorParts(WorkerContext):
    """What vLLM has told the connector while the engine was built.

    blocks: made when vLLM constructs the connector.
    why_not: what is missing for other processes to reach the memory. Empty: nothing.
    scheduler: who answers vLLM from now on. Set when the decode side is built."""

    blocks: JobBlocks = LATER
    scheduler: DecodeScheduler = LATER
    why_not: str = ""

    @property
    def begun(self) -> bool:
        return self.scheduler is not None


@dataclass(slots=True, kw_only=True)
class DecodeContext(WorkerContext):
    """What many parts of one decode side need.

    incarnation: of the worker's registration."""

    incarnation: str
    router_config: Callable[[], RouterConfig]
    traces: RequestTraces
    ledger: Ledger
    blocks: JobBlocks
