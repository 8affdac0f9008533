"""What the connector vLLM constructs must share with the prefill worker's process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pullfill.errors import ConfigError
from pullfill.prefill_worker.meter import Meter
from pullfill.prefill_worker.task import PrefillTask

if TYPE_CHECKING:
    from pullfill.engine.kv import Geometry
    from pullfill.transfer.contract import LocalMemory, Owner
    from pullfill.transfer.shm.files import RegionFiles
    from pullfill.transfer.shm.ranks import MappedRank


@dataclass(slots=True)
class PrefillContext:
    """What the connector shares with the rest of the process.

    tasks: tasks by request id. The asyncio thread writes an entry before it submits the request.
    wake: wakes the engine loop.
    files: the files of the KV memory, made before the engine.
    ranks: the memory of each rank, as this process maps it.
    owner: lets decode workers read that memory.
    meter: measures what the engine computes."""

    instance_id: str
    wake: Callable[[], None]
    tasks: dict[str, PrefillTask] = field(default_factory=dict)
    geometry: Geometry | None = None
    files: RegionFiles | None = None
    ranks: list[MappedRank] = field(default_factory=list)
    owner: Owner | None = None
    side: Any = None
    meter: Meter = field(default_factory=Meter)

    @property
    def memories(self) -> list[LocalMemory]:
        """Of all ranks, in order; empty where no transport reaches them."""
        return [rank.memory for rank in self.ranks]


_context: PrefillContext | None = None


def install(context: PrefillContext) -> None:
    """Make `context` the one of this process."""
    global _context
    _context = context


def current() -> PrefillContext:
    """The installed context. Raises ConfigError when vLLM was started without pullfill."""
    if _context is None:
        raise ConfigError(
            "the pullfill prefill connector works inside `pullfill prefill` only: start that"
        )
    return _context
