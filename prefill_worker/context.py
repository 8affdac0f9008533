"""What the connector vLLM constructs must share with the prefill worker's process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pullfill.errors import ConfigError
from pullfill.prefill_worker.task import PrefillTask

if TYPE_CHECKING:
    from pullfill.engine.kv import Geometry
    from pullfill.transfer.contract import LocalMemory


@dataclass(slots=True)
class PrefillContext:
    """tasks: request id → task, written by the asyncio thread before the request is submitted.
    wake: make the engine loop look around."""

    instance_id: str
    wake: Callable[[], None]
    tasks: dict[str, PrefillTask] = field(default_factory=dict)
    geometry: Geometry | None = None
    memory: LocalMemory | None = None
    pool: Any = None
    side: Any = None


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
