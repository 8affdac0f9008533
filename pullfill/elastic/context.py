"""What the connector of an elastic worker shares with the process around it."""

from __future__ import annotations

from dataclasses import dataclass

from pullfill.decode_worker.context import ConnectorParts
from pullfill.prefill_worker.scheduler import PrefillContext
from pullfill.worker.context import WorkerContext


@dataclass(slots=True, kw_only=True)
class ElasticContext(WorkerContext):
    """The contexts of both sides. They share the KV memory, not the fences over it.

    Each side has a fence file of its own. So a new incarnation of the decode side does not void
    what the prefill side has granted, and the other way round."""

    decode: ConnectorParts
    prefill: PrefillContext

    def share(self) -> None:
        """Show the prefill side, and this context, the memory that the decode side has mapped.

        And the adapters: those of one engine have different numbers."""
        for other in (self, self.prefill):
            other.geometry, other.ranks = self.decode.geometry, self.decode.ranks
            other.adapters = self.decode.adapters
