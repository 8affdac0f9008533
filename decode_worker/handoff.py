"""The decode side's part of every remote prefill, in the order of a job's life.

    open ─▶ publish ──(NATS)──▶ grant ─▶ commit, or ready and read ─▶ finish

The scheduler half of the connector (scheduler.py) opens jobs and finishes requests, on the engine
thread. Prefill workers claim and commit over their control connections (control.py). `Handoff` is
between them, on the worker's asyncio loop. The ledger holds the state of each job, and decides
which claims and commits count.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from pullfill.decode_worker.forecast import Links
from pullfill.decode_worker.ledger import (
    CancelMessage,
    Entry,
    JobState,
    Ledger,
    NakDelivery,
    SendRevoke,
)
from pullfill.decode_worker.peers import Peer, Peers
from pullfill.decode_worker.request_trace import RequestTraces
from pullfill.engine import features
from pullfill.errors import (
    BadMessage,
    Fenced,
    Outcome,
    PeerUnavailable,
    PullfillError,
    QueueFull,
)
from pullfill.ids import job_digest
from pullfill.queue.contract import Receipt, Urgency
from pullfill.queue.jetstream import JetStreamProducer
from pullfill.runtime import failpoints, log, metrics
from pullfill.runtime.lifecycle import Tasks, end
from pullfill.wire import (
    Claim,
    Commit,
    CommitReply,
    PrefillJob,
    Progress,
    Ready,
    Refused,
    RefuseReason,
    Trial,
    encode,
    u32,
)

logger = log.get("decode_worker.handoff")

# While so many bytes wait for a prefill worker, it gets no job with multimodal inputs. These have
# 8 MiB at most, so a connection sends those of one job at a time, and control messages never wait
# for many of them.
_BUSY = 64 << 10
_GRANTED = metrics.CLAIM.labels("granted")


@dataclass(slots=True)
class OpenedJob:
    """A job that was just opened in the ledger, to be published.

    job: lacks what the engine thread does not encode: tokens, and vLLM's multimodal inputs."""

    entry: Entry
    job: PrefillJob
    token_ids: list[int]
    urgency: Urgency = Urgency.NORMAL
    features: Sequence[Any] = ()


@dataclass(eq=False, repr=False)
class Handoff:
    """All remote prefills of one decode worker.

    asyncio thread only, but `publish`."""

    ledger: Ledger
    queue: JetStreamProducer
    traces: RequestTraces
    # The connected prefill workers. The control server adds and removes them.
    peers: Peers
    links: Links  # is told how long writing has taken
    wake: asyncio.Event  # set when the ledger has actions, or another deadline
    _loop: asyncio.AbstractEventLoop = field(init=False, default_factory=asyncio.get_running_loop)
    _tasks: Tasks = field(init=False, default_factory=Tasks)
    _watching: asyncio.Task[None] | None = field(init=False, default=None)

    async def close(self) -> None:
        """End everything that is under way. Messages of jobs that have ended are deleted from the
        queue, if it answers within 1 s."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        await end(*self._tasks, self._watching)

    # ------------------------------------------------------------------ publish, part of step 4

    def publish(self, opened: OpenedJob) -> None:
        """Have the asyncio thread publish a job that the ledger has opened. Any thread.

        vLLM's scheduler never waits for the network. After any failure the ledger serves the
        request locally."""
        self._loop.call_soon_threadsafe(self._begin, opened)

    def _begin(self, opened: OpenedJob) -> None:
        self.pulling_changed()  # the engine thread may have seen a worker that is gone now
        self._tasks.begin(self._publish(opened), "publish")
        if self._watching is None or self._watching.done():
            self._watching = self._loop.create_task(self._watch_queue(), name="queue-gone")

    async def _publish(self, opened: OpenedJob) -> None:
        ledger, entry = self.ledger, opened.entry
        job_id, request_id = entry.job_id, entry.request_id
        log.about(job_id=job_id, request_id=request_id)
        try:
            brought, brings = b"", ""
            if opened.features:  # on a thread: 8 MiB take 10 ms
                brought, brings = await asyncio.to_thread(features.encode, opened.features)
            if entry.settled:
                return  # the job ended before it was published
            tokens = u32.pack(opened.token_ids)
            job = msgspec.structs.replace(opened.job, token_ids=tokens, features=brings)
            body = encode(job)
            ledger.set_digest(job_id, job_digest(body), brought)
            failpoints.hit("decode.publish")
            if entry.to:  # past the queue
                if (peer := self.peers.get(entry.to)) is None:
                    raise PeerUnavailable(f"{entry.to} is not connected any more")
                peer.channel.write(Trial(job=body))
                return
            receipt = await self.queue.publish(job_id, body, entry.tokens, opened.urgency)
        except PullfillError as exc:
            full = isinstance(exc, QueueFull) and exc.retryable  # else the job is too large
            if not full:
                logger.warning("serving %s locally: %s", request_id, exc)
            ledger.give_up(job_id, Outcome.QUEUE_FULL if full else Outcome.PUBLISH_FAILED)
        except Exception:
            logger.exception("publishing %s failed; serving it locally", request_id)
            ledger.give_up(job_id, Outcome.PUBLISH_FAILED)
        else:
            ledger.published(entry, receipt)
            if entry.state is not JobState.QUEUED:
                self.queue.claimed(receipt)  # the claim came before the answer of the queue
            if entry.state is JobState.COMMITTED:
                self.queue.committed(receipt)

    async def _watch_queue(self) -> None:
        """Serve locally what waits for a message that the queue has no more, as long as any job is
        open. Somebody may have purged the queue, or the job may have used up its deliveries."""
        while self.ledger.open_jobs:
            await asyncio.sleep(0.5)  # such a job is served locally within a second
            if not (waiting := self.ledger.unclaimed()):
                continue
            self.queue.look_again()
            gone = self.queue.gone(waiting)
            lost = [e for receipt in gone if (e := self.ledger.find(receipt.job_id)) is not None]
            give_up = partial(self.ledger.give_up, outcome=Outcome.JOB_GONE, if_queued=True)
            if ours := [entry.request_id for entry in lost if give_up(entry.job_id)]:
                logger.warning(
                    "%d jobs are gone from the queue, deleted or dead (`pullfill doctor`). "
                    "Their prompts are prefilled here. Requests: %s",
                    len(ours),
                    ", ".join(ours[:3]) + ", ..." * (len(ours) > 3),
                )

    # ------------------------------------------------------------------ step 5: grant

    def grant(self, peer: Peer, claim: Claim) -> None:
        """Answer a claim: grant the job to this prefill worker, or refuse."""
        failpoints.hit("decode.before_grant")
        entry = self.ledger.find(claim.job_id)
        if entry is not None and entry.features and peer.channel.backlog > _BUSY:
            # 8 MiB take 0.07 s at 1 Gbit/s.
            answer: Any = Refused(rid=claim.rid, reason=RefuseReason.HELD, retry_after_s=0.05)
        else:
            answer = self.ledger.grant(claim, peer.name)
        if isinstance(answer, Refused):
            metrics.CLAIM.labels(answer.reason.value).inc()
            if answer.reason not in (RefuseReason.HELD, RefuseReason.IN_PROGRESS):
                metrics.STALE_REFUSED.labels("claim").inc()
            peer.channel.write(answer)
            return
        assert entry is not None, "a job is claimed after it was opened"
        _GRANTED.inc()
        queued_s = entry.granted_at - entry.opened_at
        self.traces.claimed(entry.request_id, answer.attempt, peer.instance_id, queued_s)
        peer.channel.write(peer.in_reach(answer))
        if entry.receipt is not None:
            self.queue.claimed(entry.receipt)

    def progress(self, peer: Peer, progress: Progress) -> None:
        """Note what has been written since the last report."""
        # A writer that was given up may have been stopped in its write: that time says nothing
        # about the link.
        if self.ledger.progress(progress, peer.name):
            self.links.wrote(peer.instance_id, progress.blocks, progress.write_s)

    # ------------------------------------------------------------------ step 8: commit

    def commit(self, peer: Peer, commit: Commit) -> None:
        """Accept the KV that this prefill worker has written: its request goes on."""
        failpoints.hit("decode.before_commit")
        entry = self.ledger.find(commit.job_id)
        if entry is not None and (entry.attempt, entry.writer) == (commit.attempt, peer.name):
            # Before the commit: after it the engine thread may finish the request at any moment.
            self.traces.committed(
                entry.request_id, commit.timings, commit.kv_bytes, commit.transport,
                commit.why_not_better,
            )  # fmt: skip
            self.links.wrote(peer.instance_id, commit.blocks, commit.timings.kv_write_ms / 1e3)
        self._answer(peer, commit, self.ledger.commit(commit, peer.name), entry)

    def ready(self, peer: Peer, ready: Ready) -> None:
        """Read the KV that this prefill worker has computed, then commit it (--kv-mode pull).

        Raises BadMessage if no grant said pull."""
        if peer.reader is None:
            raise BadMessage("ready, where no grant said pull")
        entry = self.ledger.ready(ready, peer.name)
        if isinstance(entry, str):
            self._answer(peer, ready, entry, None)
        else:
            self._tasks.begin(self._read(peer, ready, entry), "read")

    async def _read(self, peer: Peer, ready: Ready, entry: Entry) -> None:
        assert peer.reader is not None
        blocks = entry.blocks[entry.first_target :]
        began, good = time.monotonic(), False
        about = log.ids(job_id=ready.job_id, attempt=ready.attempt)
        cannot = "cannot read job %s from %s: %s", ready.job_id, peer.instance_id
        watch = asyncio.create_task(self._watch_read(peer, ready, entry.stall_s))
        try:
            source = u32.unpack(ready.block_ids)
            nbytes, seconds, transport = await peer.reader.read(
                ready.fence, source, blocks, lambda: entry.state is JobState.READING
            )
            took_ms = (time.monotonic() - began) * 1e3
            timings = msgspec.structs.replace(
                ready.timings,
                kv_write_ms=seconds * 1e3,
                tail_ms=ready.timings.tail_ms + took_ms,
            )
            failpoints.hit("decode.before_commit")
            self.traces.committed(entry.request_id, timings, nbytes, transport)
            self.links.wrote(peer.instance_id, len(blocks), seconds)
            good = True
        except Fenced:
            metrics.STALE_REFUSED.labels("read").inc()
        except PullfillError as exc:
            level = logger.warning if entry.state is JobState.READING else logger.debug
            level(*cannot, exc, extra=about)
        except Exception as exc:
            logger.exception(*cannot, exc, extra=about)
        finally:
            watch.cancel()
        self._answer(peer, ready, self.ledger.read_over(entry, good=good), entry)
        self.act()

    async def _watch_read(self, peer: Peer, ready: Ready, stall_s: float) -> None:
        """Tell the ledger that some bytes have arrived, as long as the blocks are read."""
        assert peer.reader is not None
        moved = peer.reader.moved_bytes
        while True:
            await asyncio.sleep(min(1.0, stall_s / 4))
            before, moved = moved, peer.reader.moved_bytes
            if moved != before:
                self.ledger.progress(ready, peer.name)

    def _answer(
        self, peer: Peer, asked: Commit | Ready, why: str | None, entry: Entry | None
    ) -> None:
        if why is None and entry is not None and entry.receipt is not None:
            self.queue.committed(entry.receipt)
        if why is not None:
            if why != "read_failed":  # counted where it happens
                metrics.STALE_REFUSED.labels("commit").inc()
            logger.warning(
                "refused a commit of job %s by %s: %s", asked.job_id, peer.name, why,
                extra=log.ids(job_id=asked.job_id, attempt=asked.attempt),
            )  # fmt: skip
        peer.channel.write(CommitReply(rid=asked.rid, ok=why is None, reason=why or ""))

    # ------------------------------------------------------------------ who is there, and time

    def pulling_changed(self) -> None:
        """A prefill worker may have come, left or stopped pulling. If none pulls, serve locally
        what nobody has claimed."""
        # To wait for a worker that may never come would cost each job its whole deadline.
        if not self.peers.pulling and self.ledger.open_jobs:
            self.ledger.give_up_all(Outcome.PREFILL_LOST, but_granted=True)

    def lost(self, peer: Peer) -> None:
        """Note that a connection has ended, and that its peer is no more in `peers`."""
        self.ledger.writer_lost(peer.name)
        self.wake.set()  # if the worker died, the kernel has freed its locks: ask for the proof
        self.pulling_changed()
        self.act()

    async def run(self) -> None:
        """Look at the ledger's deadlines and actions, until cancelled."""
        while True:
            try:
                soonest = self.ledger.tick()
                # A job that was in quarantine when the last worker left may be queued again.
                self.pulling_changed()
                self.act()
            except Exception:
                # Deadlines and proofs depend on this loop, so it goes on after any error.
                logger.exception("the ledger's timer failed; going on")
                soonest = 0.05
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(soonest):
                    await self.wake.wait()
            self.wake.clear()

    def act(self) -> None:
        """Do what the ledger asks of the network."""
        for action in self.ledger.take_actions():
            match action:
                case SendRevoke(name, revoke):
                    if (peer := self.peers.get(name)) is not None:
                        peer.channel.write(revoke)
                case CancelMessage(receipt):
                    self._tasks.begin(self.queue.cancel(receipt), "delete a job")
                case NakDelivery(ack_subject, receipt):
                    self._tasks.begin(self._nak(ack_subject, receipt), "nak a delivery")

    async def _nak(self, ack_subject: str, receipt: Receipt | None) -> None:
        try:
            await self.queue.nak(ack_subject, receipt)
        except BadMessage as exc:  # the claim that named it was wrong, not we
            logger.warning("a delivery is not given back to the queue: %s", exc)
