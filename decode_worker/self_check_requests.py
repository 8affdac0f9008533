"""Requests that the decode worker sends its own engine for the self-check (self_check.py).

They take the same path as any request: vLLM's scheduler, the ledger, a prefill worker's claim,
writes and commit. Three things differ. The router is not asked. The job goes over the control
channel to the prefill worker that is checked. The requests are not counted in metrics.

When a request ends, its KV is copied on the engine thread, before any step can overwrite it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pullfill.decode_worker import difference
from pullfill.decode_worker.ledger import TRIAL
from pullfill.decode_worker.rules import Decision
from pullfill.engine import requests
from pullfill.engine.compat import logprobs_are_cheap
from pullfill.engine.groups import ONE_GROUP, Groups
from pullfill.ids import new_job_id
from pullfill.runtime import log
from pullfill.transfer.copying import BlockReader, copies_of

if TYPE_CHECKING:
    from pullfill.decode_worker.context import OpenedJob
    from pullfill.decode_worker.difference import Pages
    from pullfill.decode_worker.request_trace import RequestTraces
    from pullfill.engine.host import EngineHost
    from pullfill.transfer.contract import LocalMemory

logger = log.get("decode_worker.self_check")

CLIENT = -1
"""The client index of these requests. No frontend has it."""
REASON = "self_check"
_BEST = 5
"""The log probabilities of this many most likely tokens are compared."""


class Incomplete(Exception):
    """The comparison could not be made. The message says why."""


@dataclass(slots=True, eq=False)
class Trial:
    """One request.

    writer: name of the prefill worker's connection. Empty: prefilled here.
    blocks: how many of its first blocks are copied, in each KV cache group.
    took_s: how long the request took.
    pages: the copied KV, once for each group of ranks that hold the same heads."""

    request_id: str
    writer: str
    blocks: int
    done: asyncio.Future[None]
    opened: bool = False
    loaded: bool = False
    took_s: float = 0.0
    pages: list[Pages] = field(default_factory=list)
    logprobs: dict[int, float] = field(default_factory=dict)


class Trials:
    """See the module. asyncio thread only, except where a heading says otherwise.

    send: called on the loop with a job and the connection that it goes to.
    logprobs: how many of the most likely tokens get a log probability. None: no tokens.
    groups: the KV cache groups of the model."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        host: EngineHost,
        traces: RequestTraces,
        memories: Sequence[LocalMemory],
        *,
        logprobs: int | None,
        groups: Groups = ONE_GROUP,
    ) -> None:
        self.loop = loop
        self._host = host
        self._traces = traces
        self._logprobs = logprobs
        self._groups = groups
        self._readers = [BlockReader(memories, copy=i) for i in range(copies_of(memories))]
        self._open: dict[str, Trial] = {}
        self.send: Callable[[OpenedJob, str], None] = lambda _job, _writer: None

    async def run(
        self, tokens: Sequence[int], *, salt: str, writer: str = "", blocks: int = 0
    ) -> Trial:
        """Prefill `tokens` here, or by `writer`, and sample one token. Raises Incomplete."""
        trial = Trial(f"{TRIAL}{new_job_id()}", writer, blocks, self.loop.create_future())

        def settled(loaded: bool) -> None:
            trial.loaded = loaded

        self._open[trial.request_id] = trial
        self._traces.apart[trial.request_id] = settled
        request = requests.trial_request(
            trial.request_id, tokens, cache_salt=salt, client=CLIENT, logprobs=self._logprobs
        )

        def add(core: Any) -> None:
            try:
                core.add_request(*core.preprocess_add_request(request))
            except Exception as exc:
                self._end(trial, Incomplete(f"the engine refused the prompt: {exc}"))

        began = time.monotonic()
        self._host.submit(add)
        try:
            await trial.done
            trial.took_s = time.monotonic() - began
        finally:
            self._host.submit(lambda core: self._forget(core, trial.request_id))
        if writer and not trial.loaded:
            raise Incomplete("the prefill worker did not bring the KV")
        return trial

    def _end(self, trial: Trial, failure: Exception | None) -> None:
        """End the wait for a trial. failure: raised there. Any thread."""

        def tell() -> None:
            if trial.done.done():
                return
            if failure is None:
                trial.done.set_result(None)
            else:
                trial.done.set_exception(failure)

        self.loop.call_soon_threadsafe(tell)

    # ------------------------------------------------------------------ engine thread

    def decision(self, request_id: str) -> Decision | None:
        """Return where to prefill a request of the self-check. None: it is no such request.

        If it is asked again, because the remote prefill failed, the answer is local."""
        trial = self._open.get(request_id)
        if trial is None:
            return None
        return Decision(bool(trial.writer) and not trial.opened, REASON)

    def publish(self, job: OpenedJob) -> bool:
        """Send the job if it belongs to the self-check. Returns whether it does."""
        trial = self._open.get(job.request_id)
        if trial is None:
            return False
        self.loop.call_soon_threadsafe(self.send, job, trial.writer)
        return True

    def opened(self, request_id: str) -> None:
        """Note that the request's job is open."""
        if (trial := self._open.get(request_id)) is not None:
            trial.opened = True

    def finished(self, request_id: str, tables: Sequence[Sequence[int]]) -> None:
        """Copy the request's blocks. vLLM is done with it, and has not reused them yet.

        tables: the block ids of the request, for each KV cache group."""
        trial = self._open.get(request_id)
        if trial is None or not trial.blocks or min(map(len, tables), default=0) < trial.blocks:
            return
        ids = [block for table in tables for block in table[: trial.blocks]]
        try:
            trial.pages = [
                self._of_layers(reader.pages(ids), trial.blocks) for reader in self._readers
            ]
        except Exception:  # e.g. no free memory on the GPU: the check is made again later
            logger.exception("the KV of a self-check could not be read")

    def _of_layers(self, pages: Pages, blocks: int) -> Pages:
        """Fill the memory that no layer of the blocks' group uses with zeros.

        It holds what the blocks held before, in a group with more layers."""
        most = max(self._groups.layers, default=0)
        for index, layers in enumerate(self._groups.layers):
            some = pages[index * blocks : (index + 1) * blocks]
            some.reshape(len(some), most, -1)[:, layers:] = 0
        return pages

    def take(self, outputs: dict[int, Any]) -> None:
        """Remove our requests from the outputs of a step.

        If the step's statistics come with our outputs, they are moved to any frontend's."""
        batch = outputs.pop(CLIENT, None)
        if batch is None:
            return
        for output in batch.outputs:
            trial = self._open.get(output.request_id)
            if trial is None or output.finish_reason is None:
                continue
            failed = requests.is_error(output)
            if (found := output.new_logprobs) is not None:
                pairs = zip(found.logprob_token_ids[0], found.logprobs[0], strict=True)
                trial.logprobs = {int(token): float(value) for token, value in pairs}
            self._end(trial, Incomplete("the engine failed the request") if failed else None)
        for other in outputs.values():
            other.scheduler_stats = other.scheduler_stats or batch.scheduler_stats
            break

    def _forget(self, core: Any, request_id: str) -> None:
        """Drop an aborted request. Its job is settled later, and the ledger keeps it until then."""
        core.abort_requests([request_id])
        self._open.pop(request_id, None)
        self.loop.call_soon_threadsafe(self.loop.call_later, 60.0, self._forget_trace, request_id)

    def _forget_trace(self, request_id: str) -> None:
        self._traces.apart.pop(request_id, None)


def logprobs_to_ask(kv_dtype: str) -> int | None:
    """Return how many log probabilities each request of a comparison asks vLLM for.

    None: only KV is compared, because vLLM would first compile for seconds. If the KV cannot be
    read as numbers, log probabilities are asked for all the same."""
    wanted = logprobs_are_cheap() or not difference.readable(kv_dtype)
    return _BEST if wanted else None
