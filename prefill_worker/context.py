"""What the prefill worker's connector, which vLLM constructs, shares with the process around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pullfill.prefill_worker.meter import Meter
from pullfill.prefill_worker.task import PrefillTask
from pullfill.worker.context import LATER, WorkerContext

if TYPE_CHECKING:
    from pullfill.prefill_worker.connector_scheduler import ConnectorScheduler


@dataclass(slots=True, kw_only=True)
class PrefillContext(WorkerContext):
    """What the connector shares with the rest of the process.

    tasks: tasks by request id. The asyncio thread writes an entry before it submits the request.
    wake: wakes the engine loop.
    meter: measures what the engine computes.
    concurrency: prompts that it computes in one step, at most. 0: any number.
    on_computed: called on the engine thread with the id of a job whose prompt is computed.
    scheduler: made when vLLM constructs the connector."""

    wake: Callable[[], None]
    tasks: dict[str, PrefillTask] = field(default_factory=dict)
    meter: Meter = field(default_factory=Meter)
    concurrency: int = 0
    on_computed: Callable[[str], object] = lambda _job_id: None
    scheduler: ConnectorScheduler = LATER
