"""Publishes opened jobs. vLLM's scheduler never waits for the network.

The engine thread calls `submit`, which takes microseconds. The asyncio thread encodes and publishes
the job. After any failure the ledger serves the request locally, also if the queue loses the job.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from pullfill.decode_worker.context import OpenedJob
from pullfill.decode_worker.ledger import JobState, Ledger
from pullfill.engine import features
from pullfill.errors import Outcome, PullfillError, QueueFull
from pullfill.ids import job_digest
from pullfill.queue.contract import JobProducer, Urgency
from pullfill.runtime import failpoints, log
from pullfill.wire import MAX_TEXT, PrefillJob, encode, u32

logger = log.get("decode_worker.publisher")

_LOOK_S = 0.5  # a job whose message is gone is served locally within a second


class Publisher:
    """Owns the tasks that publish.

    loop: the worker's asyncio loop.
    send: sends a job to one prefill worker, past the queue. Raises PeerUnavailable."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        queue: JobProducer,
        ledger: Ledger,
        *,
        instance_id: str,
        compat_hash: str,
        send: Callable[[str, bytes], None],
    ) -> None:
        self._loop = loop
        self._queue = queue
        self._ledger = ledger
        self._instance_id = instance_id
        self._compat_hash = compat_hash
        self._send = send
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._submitted: deque[OpenedJob] = deque()
        self._woken = False
        self._watching: asyncio.Task[None] | None = None

    def submit(self, job: OpenedJob) -> None:
        """Have the asyncio thread publish a job. Any thread.

        All jobs of one engine step wake the loop once."""
        self._submitted.append(job)
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._start)

    def _start(self) -> None:
        self._woken = False  # first, so that a job that comes from now on wakes the loop again
        while self._submitted:
            job = self._submitted.popleft()
            self._tasks[job.job_id] = self._loop.create_task(self._publish(job))
        if self._watching is None or self._watching.done():
            self._watching = self._loop.create_task(self._watch(), name="queue-gone")

    async def _watch(self) -> None:
        """Serve locally what waits for a message that the queue has no more, as long as any job is
        open. Somebody may have purged the queue, or the job may have used up its deliveries."""
        while self._ledger.open_jobs:
            await asyncio.sleep(_LOOK_S)
            if not (waiting := self._ledger.unclaimed()):
                continue
            try:
                gone = await self._queue.gone(waiting)
            except Exception:  # without this task such jobs would wait for the claim timeout
                logger.exception("an answer of the job queue could not be handled")
                continue
            lost = [e for receipt in gone if (e := self._ledger.find(receipt.job_id)) is not None]
            give_up = partial(self._ledger.give_up, outcome=Outcome.JOB_GONE, if_queued=True)
            if ours := [entry.request_id for entry in lost if give_up(entry.job_id)]:
                logger.warning(
                    "%d jobs are gone from the queue, deleted or dead (`pullfill doctor`). "
                    "Their prompts are prefilled here. Requests: %s",
                    len(ours),
                    ", ".join(ours[:3]) + ", ..." * (len(ours) > 3),
                )

    def encode(self, job: OpenedJob, brings: str = "") -> bytes:
        """Encode a job for the stream.

        brings: digest of the multimodal inputs, which the grant will bring."""
        return encode(
            PrefillJob(
                job_id=job.job_id,
                incarnation=self._ledger.incarnation,
                decode_instance=self._instance_id,
                # For people who read a dead letter. A client can make it as long as it likes.
                request_id=job.request_id[:MAX_TEXT],
                compat=self._compat_hash,
                token_ids=u32.pack(job.token_ids),
                hit_tokens=job.hit_tokens,
                block_ids=u32.pack(job.blocks),
                read_from=job.read_from,
                kept_from=job.kept_from,
                cache_salt=job.cache_salt,
                adapter=job.adapter,
                features=brings,
                priority=job.priority * len(Urgency) + job.urgency,
                timeout_s=job.timeout_s,
                trace=job.trace,
            )
        )

    async def _publish(self, job: OpenedJob) -> None:
        log.about(job_id=job.job_id, request_id=job.request_id)
        try:
            brought, brings = b"", ""
            if job.features:  # on a thread: 8 MiB take 10 ms
                brought, brings = await asyncio.to_thread(features.encoded, job.features)
            if self._ledger.find(job.job_id) is None:
                return  # the job ended before it was published
            body = self.encode(job, brings)
            self._ledger.set_digest(job.job_id, job_digest(body), brought)
            failpoints.hit("decode.publish")
            if job.to:
                return self._send(job.to, body)
            tokens = len(job.token_ids) - job.hit_tokens
            receipt = await self._queue.publish(job.job_id, body, tokens, job.urgency)
        except PullfillError as exc:
            full = isinstance(exc, QueueFull) and exc.retryable  # else the job is too large
            if not full:
                logger.warning("serving %s locally: %s", job.request_id, exc)
            outcome = Outcome.QUEUE_FULL if full else Outcome.PUBLISH_FAILED
            self._ledger.give_up(job.job_id, outcome)
        except Exception:
            logger.exception("publishing %s failed; serving it locally", job.request_id)
            self._ledger.give_up(job.job_id, Outcome.PUBLISH_FAILED)
        else:
            self._ledger.published(job.job_id, receipt)
            entry = self._ledger.find(job.job_id)
            if entry is None or entry.state is not JobState.QUEUED:
                self._queue.claimed(receipt)  # the claim came before the answer of the queue
            if entry is None and self._ledger.was_committed(job.job_id):
                self._queue.committed(receipt)
        finally:
            del self._tasks[job.job_id]  # a done callback would cost a turn of the loop
