"""What prefill workers say about a job, from the claim to the commit, and what they are answered.

    Claim  ─▶ grant ─▶ Grant, or Refused
    Commit ─▶ commit ─▶ CommitReply
    Ready  ─▶ ready ─▶ read its blocks (kv_reader.py) ─▶ CommitReply

The ledger decides. Everything runs on the asyncio thread. The control server receives the messages,
starts the tasks that read, and stops them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from pullfill.decode_worker.forecast import PrefillWorkers
from pullfill.decode_worker.ledger import Entry, JobState, Ledger
from pullfill.decode_worker.peers import Peer
from pullfill.decode_worker.request_trace import RequestTraces
from pullfill.errors import BadMessage, Fenced, PullfillError
from pullfill.runtime import failpoints, log, metrics
from pullfill.wire import (
    Claim,
    Commit,
    CommitReply,
    GiveUp,
    Progress,
    Ready,
    Refused,
    RefuseReason,
)

logger = log.get("decode_worker.control")

_BUSY = 64 << 10
"""While so many bytes wait for a prefill worker, it gets no job with multimodal inputs. These have
8 MiB at most, so a connection sends those of one job at a time, and control messages never wait for
many of them."""
_BUSY_RETRY_S = 0.05  # 8 MiB take 0.07 s at 1 Gbit/s
_GRANTED = metrics.CLAIM.labels("granted")


class Grants:
    """Grants jobs to prefill workers, and takes in what they bring.

    spawn: runs a task that may outlast the handling of a message.
    act: carries out the actions that the ledger has queued.
    claimed, committed: called with the queue's receipt of each job that is granted, or committed.
    """

    def __init__(
        self,
        ledger: Ledger,
        traces: RequestTraces,
        forecaster: PrefillWorkers,
        spawn: Callable[[Awaitable[object]], None],
        act: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._traces = traces
        self._forecaster = forecaster
        self._spawn = spawn
        self._act = act
        self.claimed: Callable[[Any], None] = lambda _receipt: None
        self.committed: Callable[[Any], None] = lambda _receipt: None

    # ------------------------------------------------------------------ step 5: grant

    def grant(self, peer: Peer, claim: Claim) -> None:
        """Answer a claim: grant the job to this prefill worker, or refuse."""
        failpoints.hit("decode.before_grant")
        entry = self._ledger.find(claim.job_id)
        if entry is not None and entry.features and peer.channel.backlog > _BUSY:
            self._refuse(
                peer,
                Refused(rid=claim.rid, reason=RefuseReason.HELD, retry_after_s=_BUSY_RETRY_S),
            )
            return
        answer = self._ledger.grant(claim, peer.name)
        if isinstance(answer, Refused):
            self._refuse(peer, answer)
            return
        assert entry is not None
        _GRANTED.inc()
        queued_s = entry.granted_at - entry.opened_at
        self._traces.claimed(entry.request_id, answer.attempt, peer.instance_id, queued_s)
        peer.channel.write(peer.in_reach(answer))
        if entry.receipt is not None:
            self.claimed(entry.receipt)

    def _refuse(self, peer: Peer, refused: Refused) -> None:
        metrics.CLAIM.labels(refused.reason.value).inc()
        if refused.reason not in (RefuseReason.HELD, RefuseReason.IN_PROGRESS):
            metrics.STALE_REFUSED.labels("claim").inc()
        peer.channel.write(refused)

    def progress(self, peer: Peer, progress: Progress) -> None:
        """Note what has been written since the last report."""
        self._forecaster.wrote(peer.instance_id, progress.blocks, progress.write_s)
        self._ledger.progress(progress, peer.name)

    def gave_up(self, peer: Peer, said: GiveUp) -> None:
        """Handle a prefill worker that gives a job up."""
        self._ledger.gave_up(said, peer.name)

    # ------------------------------------------------------------------ step 8: commit

    def commit(self, peer: Peer, commit: Commit) -> None:
        """Accept the KV that this prefill worker has written: its request goes on."""
        failpoints.hit("decode.before_commit")
        entry = self._ledger.find(commit.job_id)
        if entry is not None and (entry.attempt, entry.writer) == (commit.attempt, peer.name):
            # Before the commit: after it the engine thread may finish the request at any moment.
            self._traces.committed(
                entry.request_id,
                commit.timings,
                commit.kv_bytes,
                commit.transport,
                commit.why_not_better,
            )
            self._forecaster.wrote(
                peer.instance_id, commit.blocks, commit.timings.kv_write_ms / 1e3
            )
        answer = self._ledger.commit(commit, peer.name)
        self._answer(peer, commit, answer, entry)

    def ready(self, peer: Peer, ready: Ready) -> None:
        """Read the KV that this prefill worker has computed, then commit it (--kv-mode pull).

        Raises BadMessage if no grant said pull."""
        if peer.reader is None:
            raise BadMessage("ready, where no grant said pull")
        entry = self._ledger.ready(ready, peer.name)
        if isinstance(entry, str):
            self._answer(peer, ready, entry, None)
        else:
            self._spawn(self._read(peer, ready, entry))

    async def _read(self, peer: Peer, ready: Ready, entry: Entry) -> None:
        assert peer.reader is not None
        blocks = entry.blocks[entry.first_target :]
        began, good = time.monotonic(), False
        watch = asyncio.create_task(self._watch(peer, ready, entry.stall_s))
        try:
            moved, transport = await peer.reader.fetch(
                ready, blocks, lambda: entry.state is JobState.READING
            )
            took_ms = (time.monotonic() - began) * 1e3
            timings = msgspec.structs.replace(
                ready.timings,
                kv_write_ms=moved.seconds * 1e3,
                tail_ms=ready.timings.tail_ms + took_ms,
            )
            failpoints.hit("decode.before_commit")
            self._traces.committed(entry.request_id, timings, moved.nbytes, transport)
            self._forecaster.wrote(peer.instance_id, len(blocks), moved.seconds)
            good = True
        except Fenced:
            metrics.STALE_REFUSED.labels("read").inc()
        except PullfillError as exc:
            level = logger.warning if entry.state is JobState.READING else logger.debug
            about = log.ids(job_id=ready.job_id, attempt=ready.attempt)
            level(
                "cannot read job %s from %s: %s", ready.job_id, peer.instance_id, exc, extra=about
            )
        except Exception:
            about = log.ids(job_id=ready.job_id, attempt=ready.attempt)
            logger.exception(
                "cannot read job %s from %s", ready.job_id, peer.instance_id, extra=about
            )
        finally:
            watch.cancel()
        answer = self._ledger.read_over(entry, good=good)
        self._answer(peer, ready, answer, entry)
        self._act()

    async def _watch(self, peer: Peer, ready: Ready, stall_s: float) -> None:
        """Tell the ledger that some bytes have arrived, as long as the blocks are read."""
        assert peer.reader is not None
        moved = peer.reader.moved_bytes
        while True:
            await asyncio.sleep(min(1.0, stall_s / 4))
            before, moved = moved, peer.reader.moved_bytes
            if moved != before:
                self._ledger.progress(ready, peer.name)

    def _answer(
        self, peer: Peer, asked: Commit | Ready, why: str | None, entry: Entry | None
    ) -> None:
        if why is None and entry is not None and entry.receipt is not None:
            self.committed(entry.receipt)
        if why is not None:
            if why != "read_failed":  # counted where it happens
                metrics.STALE_REFUSED.labels("commit").inc()
            logger.warning(
                "refused a commit of job %s by %s: %s", asked.job_id, peer.name, why,
                extra=log.ids(job_id=asked.job_id, attempt=asked.attempt),
            )  # fmt: skip
        peer.channel.write(CommitReply(rid=asked.rid, ok=why is None, reason=why or ""))
