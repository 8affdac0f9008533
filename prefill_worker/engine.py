"""Gives the tasks of a prefill worker to its engine.

When a job is granted, `Handoff` makes a vLLM request of its task. The request samples one token,
which nobody reads. While the request runs, scheduler.py hands its KV to the transfer worker.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from pullfill.engine import adapters
from pullfill.engine import requests as engine_requests
from pullfill.engine.adapters import AdapterFiles
from pullfill.errors import BadMessage
from pullfill.prefill_worker.reach import OutOfReach
from pullfill.prefill_worker.task import PrefillTask
from pullfill.runtime import log
from pullfill.wire import Adapter
from pullfill.worker.context import WorkerContext
from pullfill.worker.engine_loop import EngineLoop

logger = log.get("prefill_worker.engine")


FILES_S = 20.0
"""How long a prefill worker may take to read an adapter's files. A network drive may hang."""


@dataclass(eq=False, repr=False)
class PrefillEngine:
    """Submits and ends tasks. Methods are called on the asyncio thread."""

    requests: EngineLoop
    tasks: dict[str, PrefillTask]  # see `PrefillScheduler`
    context: WorkerContext
    limit: Callable[[str], int]  # how many multimodal inputs of a modality a prompt may have

    def __post_init__(self) -> None:
        self.groups = max(1, len(self.context.groups.layers))
        self._files = AdapterFiles()

    def submit(self, task: PrefillTask) -> None:
        """Start computing. The task ends through its `on_done`."""
        self.tasks[task.request_id] = task
        try:
            lora_request = None
            if task.job.adapter is not None:
                lora_request = self.context.adapters.named(adapters.lora_request(task.job.adapter))
            self._check_features(task)
        except OutOfReach as exc:
            task.end(exc)
            return
        # Clocks of machines differ. The grant tells how long the job has waited.
        due_s, left_s = task.job.due_s, task.grant.due_s
        waited_s = 0.0 if left_s is None else max(0.0, due_s - left_s)
        request = engine_requests.own_request(
            task.request_id,
            task.token_ids,
            cache_salt=task.job.cache_salt,
            priority=task.job.priority,
            ttft_ms=max(1.0, due_s * 1e3) if due_s else None,
            arrival_time=time.time() - waited_s,
            lora_request=lora_request,
            mm_features=task.features,
        )
        self.requests.add(request).add_done_callback(partial(_ended, task))

    async def check_adapter(self, adapter: Adapter) -> None:
        """Check that this worker has the adapter's files, as they are for the decode worker.

        Raises OutOfReach."""
        if self.context.adapters.has(adapter):
            return
        try:
            async with asyncio.timeout(FILES_S):
                found = await self._files.content(adapter.path)
        except TimeoutError:
            raise OutOfReach(
                f"LoRA adapter {adapter.name}: {adapter.path} was not read in {FILES_S:.0f} s"
            ) from None
        if found != adapter.content:
            why = "has other files" if found else "is not"
            raise OutOfReach(f"LoRA adapter {adapter.name} {why} at {adapter.path} here")

    def end(self, task: PrefillTask) -> None:
        """Forget the task, and abort its request if it still runs.

        The engine keeps its blocks until no copy reads them."""
        self.requests.abort(task.request_id, lambda: self.tasks.pop(task.request_id, None))

    def _check_features(self, task: PrefillTask) -> None:
        """Check that the engine takes so many inputs. Else its scheduler would wait for ever.

        Raises OutOfReach."""
        for modality, count in Counter(f.modality for f in task.features).items():
            if count > (most := self.limit(modality)):
                raise OutOfReach(
                    f"the prompt has {count} inputs of type {modality}, and this worker takes "
                    f"{most} (--limit-mm-per-prompt)"
                )


def _ended(task: PrefillTask, outcome: Future[Any]) -> None:
    """End a task that the engine refused or failed. The connector ends others. Engine thread."""
    failure = outcome.exception()
    if failure is None:
        return
    if isinstance(failure, BadMessage):
        failure = OutOfReach(str(failure))
    else:
        about = log.ids(job_id=task.job_id, attempt=task.attempt)
        logger.error("job %s: %s", task.job_id, failure, exc_info=failure, extra=about)
    task.end(failure)
