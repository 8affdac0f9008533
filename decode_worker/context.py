"""`DecodeContext`: what most parts of one decode side need. side.py makes it once for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pullfill.wire import Welcome
from pullfill.worker.context import WorkerContext

if TYPE_CHECKING:
    from pullfill.decode_worker.ledger import Ledger
    from pullfill.decode_worker.request_trace import RequestTraces
    from pullfill.decode_worker.scheduler import JobBlocks
    from pullfill.wire import RouterConfig


@dataclass(slots=True, kw_only=True)
class DecodeContext:
    """See the module."""

    worker: WorkerContext
    router_config: Callable[[], RouterConfig]
    traces: RequestTraces
    ledger: Ledger
    blocks: JobBlocks

    def welcome(self) -> Welcome:
        """What a worker that connects is told first."""
        return Welcome(
            decode_instance=self.worker.instance_id, regions=self.worker.owner.describe()
        )
