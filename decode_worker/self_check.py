"""Two workers that meet for the first time compare a remote prefill with a local one.

    prefill worker connects → its kind is known? ──passed──▶ it may bring KV
                                   │         └──failed──▶ it may not, until that is cleared
                                   no: one prompt of random tokens, prefilled here, then by it;
                                       KV and log probabilities compared; the result kept in etcd

Until there is a result the prefill worker gets no jobs. A comparison that could not be made is made
again after a pause. Only values that differ are a failure.

The remote prefill is made in two steps: half of the prompt, then all of it. So the prefill worker
computes the second half on top of a context, as it does for a prompt in chunks.

asyncio thread only, except where a method says otherwise.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from pullfill.backoff import Backoff
from pullfill.decode_worker import difference
from pullfill.decode_worker.context import DecodeContext, OpenedJob
from pullfill.decode_worker.ledger import UNDER_WAY, JobState, Ledger
from pullfill.decode_worker.peers import Peer
from pullfill.decode_worker.rules import SELF_CHECK_FAILED as FAILED
from pullfill.decode_worker.rules import SELF_CHECK_PENDING as PENDING
from pullfill.decode_worker.self_check_requests import (
    Incomplete,
    Trial,
    Trials,
    logprobs_to_ask,
)
from pullfill.engine.compat import dtype_of_kv, rounding_digest
from pullfill.engine.groups import ONE_GROUP, Groups
from pullfill.errors import BadMessage, Outcome
from pullfill.ids import job_digest, new_job_id
from pullfill.queue.streams import parse_ack
from pullfill.registry.self_checks import SelfChecks
from pullfill.runtime import log, metrics
from pullfill.wire import Claim, Compat, Refused, RefuseReason, SelfCheck
from pullfill.wire import Trial as TrialJob

if TYPE_CHECKING:
    from pullfill.engine.host import EngineHost

logger = log.get("decode_worker.self_check")

BLOCKS, TOKENS = (2, 4), 256
"""Length of the compared prompt: the least and the most blocks, and tokens that it should not
exceed. Most of a comparison's time is the computation of these tokens."""
LONGEST_S = 30.0
"""A comparison that takes longer is given up and repeated."""
_PAUSES_S = (0.5, 30.0)
"""Pause before the second try, and the longest pause. It doubles each time."""
_LOOK_S = 0.5
"""How often a pause checks for a new prefill worker, which does not wait for its end."""


@dataclass(frozen=True, slots=True)
class Ours:
    """What the comparison needs to know about this worker.

    computes: `engine.compat.rounding_digest`. Empty: nothing is compared, and every prefill worker
    may bring KV.
    blocks: length of the compared prompt."""

    instance_id: str
    compat_hash: str
    computes: str
    block_size: int
    blocks: int
    vocabulary: int
    layers: int
    kv_dtype: str
    model_dtype: str
    groups: Groups = ONE_GROUP


class Checks:
    """The self-checks of this decode worker with all kinds of prefill workers.

    encode: encodes a job as on the stream.
    on_change: called when it has changed which prefill workers may bring KV."""

    def __init__(
        self,
        ours: Ours,
        trials: Trials,
        kept: SelfChecks,
        ledger: Ledger,
        encode: Callable[[OpenedJob], bytes],
        on_change: Callable[[], None],
    ) -> None:
        self._ours = ours
        self._trials = trials
        self._kept = kept
        self._ledger = ledger
        self._encode = encode
        self._on_change = on_change
        self._results = dict(kept.current)
        self._peers: dict[str, tuple[Peer, str]] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._jobs: dict[str, str] = {}
        self._one = asyncio.Lock()
        self._closed = False
        kept.on_change = self._changed
        trials.send = self._send

    async def close(self) -> None:
        """Cancel the comparisons under way."""
        self._closed = True
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    # ------------------------------------------------------------------ prefill workers

    def met(self, peer: Peer) -> None:
        """Handle a new prefill worker: set whether it may bring KV, or begin a comparison."""
        if not self._ours.computes or not peer.computes:
            peer.cleared = True
            self._on_change()
            return
        self._peers[peer.name] = peer, self._pair(peer)
        self._judge()

    def lost(self, peer: Peer) -> None:
        """Forget a prefill worker whose connection has ended. Give up the trials sent to it."""
        self._peers.pop(peer.name, None)
        for job_id, writer in self._jobs.items():
            if writer == peer.name:
                self._ledger.give_up(job_id, Outcome.PREFILL_LOST)

    def may_claim(self, peer: Peer, claim: Claim) -> bool:
        """Whether the prefill worker may have the job.

        If not, its claim is refused. If others may have the job, it goes back to the queue for
        them, once. Otherwise the prompt is prefilled here."""
        if peer.cleared or self._jobs.get(claim.job_id) == peer.name:
            return True
        entry = self._ledger.find(claim.job_id)
        reason = RefuseReason.CLOSED
        if entry is not None and entry.state in UNDER_WAY:
            reason = RefuseReason.IN_PROGRESS
        elif entry is not None and not entry.settled and self._left_to_others(claim):
            reason = RefuseReason.NOT_CLEARED
        elif entry is not None and entry.state is JobState.QUEUED:
            self._ledger.give_up(claim.job_id, Outcome.SELF_CHECK)
        metrics.CLAIM.labels(reason.value).inc()
        peer.channel.write(Refused(rid=claim.rid, reason=reason))
        return False

    def _left_to_others(self, claim: Claim) -> bool:
        """Whether another prefill worker may soon have this job."""
        if not any(p.cleared and p.pulls and not p.leaving for p, _ in self._peers.values()):
            return False
        try:
            return parse_ack(claim.ack_subject).number == 1
        except BadMessage:
            return False

    def _pair(self, peer: Peer) -> str:
        ours = self._ours
        text = f"{ours.compat_hash} {ours.computes} {peer.computes}"
        return blake2b(text.encode(), digest_size=8).hexdigest()

    def _judge(self) -> None:
        """Set for each peer whether it may bring KV. Compare the pairs without a result."""
        for peer, pair in self._peers.values():
            result, before = self._results.get(pair), peer.cleared
            peer.cleared = result is not None and result.passed
            if before and not peer.cleared:
                self._ledger.distrust(peer.name)
            if result is None and pair not in self._running and not self._closed:
                self._running[pair] = asyncio.create_task(self._find_out(pair))
        self._on_change()

    def _changed(self, pair: str, result: SelfCheck | None) -> None:
        """Handle a result that has changed in etcd.

        A failure that is gone was cleared by somebody. A success that is gone was lost with etcd's
        data, and is written again."""
        ours = self._results.get(pair)
        if result is not None:
            self._results[pair] = result
        elif ours is not None and ours.passed:
            self._kept.keep(pair, ours)
        else:
            self._results.pop(pair, None)
        self._judge()

    # ------------------------------------------------------------------ what is told

    @property
    def failures(self) -> list[str]:
        """One line for each connected prefill worker whose check has failed. Any thread."""
        return [
            self._advice(peer, result)
            for peer, pair in list(self._peers.values())
            if (result := self._results.get(pair)) is not None and not result.passed
        ]

    def _advice(self, peer: Peer, result: SelfCheck) -> str:
        return result.advice(peer.instance_id, self._ours.instance_id)

    @property
    def reason(self) -> str:
        """Why the self-check lets no prefill worker bring KV. Empty: there is no such reason.

        Any thread."""
        peers = list(self._peers.values())
        if not peers or any(peer.cleared for peer, _ in peers):
            return ""
        return PENDING if any(pair not in self._results for _, pair in peers) else FAILED

    def told(self) -> dict[str, object]:
        """The state of the self-checks, for /status."""
        return {
            "self_check": self.reason or "passed",
            "self_checks": [
                {
                    "prefill_instance": peer.instance_id,
                    "pair": pair,
                    "result": "pending" if result is None else result.word,
                    "advice": None
                    if result is None or result.passed
                    else self._advice(peer, result),
                    "kv_difference": result and result.kv_difference,
                    "kv_tolerance": result and result.kv_tolerance,
                    "logprob_difference": result and result.logprob_difference,
                    "logprob_tolerance": result and result.logprob_tolerance,
                }
                for peer, pair in self._peers.values()
                for result in [self._results.get(pair)]
            ],
        }

    # ------------------------------------------------------------------ one comparison

    def _send(self, job: OpenedJob, writer: str) -> None:
        found = self._peers.get(writer)
        if found is None:
            self._ledger.give_up(job.job_id, Outcome.PREFILL_LOST)
            return
        body = self._encode(job)
        self._ledger.set_digest(job.job_id, job_digest(body))
        self._jobs[job.job_id] = writer
        found[0].channel.write(TrialJob(job=body))

    async def _find_out(self, pair: str) -> None:
        """Compare until there is a result, or no prefill worker of this pair is connected.

        Each try is with another worker of the pair: one may be out of reach, or stand still."""
        backoff, tries = Backoff(*_PAUSES_S), Counter[str]()
        try:
            while pair not in self._results:
                peers = [peer for peer, other in self._peers.values() if other == pair]
                if not peers:
                    return
                seen = set(self._peers)
                peer = min(peers, key=lambda one: tries[one.instance_id])
                tries[peer.instance_id] += 1
                try:
                    async with self._one, asyncio.timeout(LONGEST_S):
                        started = time.monotonic()
                        result, local_s = await self._compare(peer)
                        took_s = time.monotonic() - started
                except (Incomplete, TimeoutError) as exc:
                    why = str(exc) or f"no answer in {LONGEST_S:.0f} s"
                    logger.info("self-check with %s: %s; trying again", peer.instance_id, why)
                except Exception:
                    logger.exception("self-check with %s failed; trying again", peer.instance_id)
                else:
                    self._results.setdefault(pair, result)
                    self._kept.keep(pair, result)
                    self._say(peer, result, took_s, local_s)
                    break
                metrics.SELF_CHECK.labels("incomplete").inc()
                pause = backoff.next()
                for _ in range(round(pause / (look_s := min(pause, _LOOK_S)))):
                    await asyncio.sleep(look_s)
                    if not self._peers.keys() <= seen:
                        break
        except Exception:
            logger.exception("the self-check failed; prompts are prefilled here")
        finally:
            self._running.pop(pair, None)
        self._judge()

    def _say(self, peer: Peer, result: SelfCheck, took_s: float, local_s: float) -> None:
        metrics.SELF_CHECK.labels(result.word).inc()
        if result.passed:
            logger.info(
                "self-check with %s passed in %.0f ms, a local prefill took %.0f: %s",
                peer.instance_id, took_s * 1e3, local_s * 1e3, result.in_words(),
            )  # fmt: skip
            return
        logger.error("%s (found in %.0f ms)", self._advice(peer, result), took_s * 1e3)

    async def _compare(self, peer: Peer) -> tuple[SelfCheck, float]:
        """Return the result, and how long the local prefill took, in seconds."""
        ours, run = self._ours, self._trials.run
        self._jobs.clear()  # of the last comparison
        # Not the first and last tokens of the vocabulary: there are the special tokens.
        ordinary = range(ours.vocabulary // 4, 3 * ours.vocabulary // 4)
        blocks = ours.blocks
        if longest := peer.max_prompt_tokens:
            blocks = max(1, min(blocks, longest // ours.block_size))
        tokens = random.choices(ordinary, k=blocks * ours.block_size)
        salt, half = new_job_id(), blocks // 2 * ours.block_size
        # At the same time, on two workers. If both fail, the second ends by itself.
        both = [run(tokens, salt=new_job_id(), blocks=blocks)]
        if half:
            both.append(run(tokens[: half + 1], salt=salt, writer=peer.name))
        local, *_ = await asyncio.gather(*both)
        remote = await run(tokens, salt=salt, writer=peer.name, blocks=blocks)
        if not local.pages or not remote.pages:
            raise Incomplete("the KV of the prompt could not be read")
        result = await asyncio.to_thread(self._judged, local, remote, peer.instance_id)
        return result, local.took_s

    def _judged(self, local: Trial, remote: Trial, prefill_instance: str) -> SelfCheck:
        ours = self._ours
        found = [
            difference.of_groups(a, b, ours.kv_dtype, ours.layers, ours.groups)
            for a, b in zip(local.pages, remote.pages, strict=True)
        ]
        known = [value for value in found if value is not None]
        kv = max(known) if known else None
        logprob = None
        if local.logprobs:
            logprob = difference.logprob_difference(local.logprobs, remote.logprobs)
        if kv is None and logprob is None:
            raise Incomplete(f"neither {ours.kv_dtype} KV nor log probabilities could be compared")
        kv_most = difference.kv_tolerance(ours.kv_dtype)
        logprob_most = difference.logprob_tolerance(ours.model_dtype)
        return SelfCheck(
            passed=(kv or 0.0) <= kv_most and (logprob or 0.0) <= logprob_most,
            kv_difference=kv,
            kv_tolerance=kv_most,
            logprob_difference=logprob,
            logprob_tolerance=logprob_most,
            decode_instance=ours.instance_id,
            prefill_instance=prefill_instance,
        )


def wanted_blocks(block_size: int) -> int:
    """How many blocks of so many tokens the compared prompt should have.

    At least two: the prefill worker computes the second one on top of the first."""
    least, most = BLOCKS
    return max(least, min(most, TOKENS // block_size))


def checks_for(
    context: DecodeContext,
    config: Any,
    compat: Compat,
    host: EngineHost,
    kept: SelfChecks,
    on_change: Callable[[], None],
    encode: Callable[[OpenedJob], bytes],
) -> Checks | None:
    """Make the self-check of this worker, or return None if nothing can be compared.

    That is so if no transport reaches the KV memory, if there is no model or it generates no text,
    or if no prompt of whole blocks may be prefilled remotely."""
    block_size = config.cache_config.block_size
    fits = context.scheduler.longest_kept(wanted_blocks(block_size) * block_size)
    blocks = min(fits, config.model_config.max_model_len - 2) // block_size
    how = rounding_digest(config)
    generates = config.model_config.runner_type == "generate"
    if not context.memories or not how or not generates or blocks < 1:
        return None
    kv_dtype = dtype_of_kv(config)
    context.trials = Trials(
        asyncio.get_running_loop(), host, context.traces, context.memories,
        logprobs=logprobs_to_ask(kv_dtype), groups=context.groups,
    )  # fmt: skip
    ours = Ours(
        instance_id=context.instance_id,
        compat_hash=compat.hash(),
        computes=how,
        block_size=block_size,
        blocks=blocks,
        vocabulary=config.model_config.get_vocab_size(),
        layers=compat.num_layers,
        kv_dtype=kv_dtype,
        model_dtype=compat.dtype,
        groups=context.groups,
    )
    return Checks(ours, context.trials, kept, context.ledger, encode, on_change)
