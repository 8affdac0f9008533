"""One attempt's task and messages, made from a job and its grant. Pure but for the clock."""

from __future__ import annotations

import time

from pullfill.errors import BadMessage
from pullfill.ids import job_digest
from pullfill.prefill_worker.ending import Calls, TooLong, resolver
from pullfill.prefill_worker.task import PrefillTask
from pullfill.prefill_worker.transfer_worker import TransferWorker
from pullfill.queue.contract import Delivery
from pullfill.runtime.waits import Prompt
from pullfill.transfer.digest import sampled
from pullfill.wire import MAX_TEXT, Commit, FenceToken, Grant, PrefillJob, Ready, StageTimings, u32


def check(
    job: PrefillJob, body: bytes, tokens: list[int], grant: Grant, *, block_size: int,
    compat_hash: str, max_prompt_tokens: int,
) -> None:  # fmt: skip
    """Check that the pulled job is the one that the decode worker granted, and that it fits here.

    A grant names no blocks. The block IDs of the job are used, because equal digests prove that the
    decode worker published them. Raises BadMessage or TooLong."""
    if job_digest(body) != grant.job_digest:
        raise BadMessage("the job differs from what the decode worker published")
    blocks = len(job.block_ids) // u32.SIZE
    if (
        len(job.block_ids) % u32.SIZE
        or blocks != -(-len(tokens) // job.block_size)
        or job.hit_tokens % job.block_size
    ):
        raise BadMessage("the job's blocks do not match its tokens")
    if job.block_size != block_size or job.compat != compat_hash:
        raise BadMessage("block size or compatibility hash is not this worker's")
    if len(tokens) > max_prompt_tokens:
        raise TooLong(
            f"prompt of {len(tokens)} tokens is longer than this prefill worker takes "
            f"({max_prompt_tokens})"
        )


def make_task(
    job: PrefillJob,
    tokens: list[int],
    grant: Grant,
    transfer_worker: TransferWorker,
    done: Prompt[None],
    calls: Calls,
) -> PrefillTask:
    """`done` is resolved, through `calls`, when all is written (or kept), or the task failed."""
    blocks = u32.unpack(job.block_ids)
    targets = blocks[job.hit_tokens // job.block_size :]
    checked = sampled(grant.kv_digest, len(targets), grant.job_digest, grant.attempt)
    return PrefillTask(
        request_id=f"{job.job_id}.{grant.attempt}",
        job_id=job.job_id,
        attempt=grant.attempt,
        token_ids=tokens,
        block_size=job.block_size,
        hit_tokens=job.hit_tokens,
        remote_blocks=blocks,
        fence=grant.fence,
        cache_salt=job.cache_salt,
        priority=job.priority,
        transfer_worker=transfer_worker,
        on_done=resolver(done, calls),
        checked=frozenset(targets[index] for index in checked),
        mode=grant.mode,
    )


def timings(task: PrefillTask, delivery: Delivery, claim_ms: float) -> StageTimings:
    """What was measured until now, when the commit (or `Ready`) goes out."""
    computed = task.last_compute or task.started
    return StageTimings(
        queue_ms=delivery.age_s * 1e3,
        claim_ms=claim_ms,
        prefix_read_ms=task.read_s * 1e3,
        prefill_ms=max(0.0, computed - (task.first_step or task.started)) * 1e3,
        kv_write_ms=task.write_s * 1e3,
        tail_ms=max(0.0, time.monotonic() - computed) * 1e3,
    )


def commit(rid: int, task: PrefillTask, grant: Grant, measured: StageTimings) -> Commit:
    return Commit(
        rid=rid,
        job_id=task.job_id,
        attempt=task.attempt,
        incarnation=grant.incarnation,
        parts=task.parts,
        blocks=task.written_blocks,
        kv_bytes=task.written_bytes,
        prefix_read_bytes=task.read_bytes,
        timings=measured,
        digest=task.digest,
        transport=task.transfer_worker.transport[:MAX_TEXT],
        why_not_better=tuple(task.transfer_worker.why_not_better),
    )


def ready(
    rid: int, task: PrefillTask, grant: Grant, fence: FenceToken, measured: StageTimings
) -> Ready:
    """fence: over `task.kept_blocks`, in our own region."""
    return Ready(
        rid=rid,
        job_id=task.job_id,
        attempt=task.attempt,
        incarnation=grant.incarnation,
        parts=task.parts,
        block_ids=u32.pack(task.kept_blocks),
        fence=fence,
        prefix_read_bytes=task.read_bytes,
        timings=measured,
        digest=task.digest,
    )
