"""Checks that the KV in the blocks is what the prefill worker computed (`--kv-digest`).

The ledger asks for it after a commit, when the writer is proved quiet. A thread computes the
digests from the decode worker's own memory. It only reads. So a job that ends meanwhile gives its
blocks back at once, and the result of its check is ignored.

The control server closes it. The KV memory must live longer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import gcd

from pullfill.decode_worker.ledger import Ledger
from pullfill.decode_worker.ledger_types import Verify
from pullfill.errors import Outcome
from pullfill.runtime import log, metrics
from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.digest import DIGEST_BYTES, BlockDigester, copies_of, sampled
from pullfill.transfer.pieces import cut_memory
from pullfill.wire import DigestMode

logger = log.get("decode_worker.verify")

SUSPECT = 3
"""From this many mismatches of one prefill worker on, the log asks to remove it."""


class Verifier:
    """Digests on a thread, verdicts on the asyncio thread."""

    def __init__(
        self, ledger: Ledger, memories: Sequence[LocalMemory], block_size: int = 1
    ) -> None:
        """memories: of all ranks. Where several hold the same heads, each copy is checked."""
        self._ledger = ledger
        self._memories = memories
        self._block_size = block_size
        self._digesters: dict[int, list[BlockDigester]] = {}
        self._thread = ThreadPoolExecutor(1, "kv-digest")
        self._mismatches: Counter[str] = Counter()

    async def settle(
        self, verify: Verify, prefill_instance: str, block_size: int = 0
    ) -> str | None:
        """Check a commit, tell the ledger, and return what `Ledger.verified` says.

        block_size: of the prefill worker. 0: as ours. If it is another, digests are of pieces of
        blocks (transfer/pieces.py).

        A check that cannot be made counts as failed: the prompt is computed here."""
        loop = asyncio.get_running_loop()
        try:
            wrong = await loop.run_in_executor(self._thread, self._compare, verify, block_size)
        except Exception as exc:
            extra = log.ids(job_id=verify.job_id, attempt=verify.attempt)
            logger.exception(
                "the digest of job %s could not be checked", verify.job_id, extra=extra
            )
            wrong = f"not checked: {exc!r}"
        why = self._ledger.verified(verify.job_id, verify.attempt, good=not wrong)
        # A job that ended meanwhile does not count: its blocks may be another's by now.
        if why is None:
            metrics.KV_DIGEST.labels("match").inc()
        elif why == Outcome.DIGEST_MISMATCH.value:
            metrics.KV_DIGEST.labels("mismatch").inc()
            self._complain(verify, prefill_instance, wrong)
        return why

    def close(self) -> None:
        """Stop. When this returns, nothing reads the KV memory any more.

        It waits for one check at most."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _made(self, pieces: int) -> list[BlockDigester]:
        """Return one digester for each copy of the KV, made on first use."""
        if pieces not in self._digesters:
            memories = self._memories
            if pieces > 1:
                memories = [cut_memory(memory, pieces) for memory in memories]
            copies = range(copies_of(memories))
            self._digesters[pieces] = [BlockDigester(memories, copy=i) for i in copies]
        return self._digesters[pieces]

    def _compare(self, verify: Verify, block_size: int) -> str:
        """Compute and compare the digests, on the thread. Returns what is wrong. Empty: nothing."""
        started = time.perf_counter()
        sent, size = verify.digest, DIGEST_BYTES
        tokens = gcd(self._block_size, block_size or self._block_size)
        pieces = self._block_size // tokens
        blocks: Sequence[int] = verify.blocks
        if pieces > 1:  # a prefill worker writes no piece without a token of the prompt
            hit, end = verify.hit_tokens, verify.hit_tokens + verify.tokens
            first = hit // self._block_size
            blocks = verify.order.cut_ids(blocks, pieces, first, -(-end // tokens))
        checked = sampled(verify.kv_digest, len(blocks), verify.job_digest, verify.attempt)
        if len(sent) != len(checked) * size:
            return f"its digest has {len(sent)} bytes instead of {len(checked) * size}"
        made = [d.digest([blocks[index] for index in checked]) for d in self._made(pieces)]
        metrics.KV_DIGEST_SECONDS.observe(time.perf_counter() - started)
        wrong = [
            index
            for at, index in zip(range(0, len(sent), size), checked, strict=True)
            if any(one[at : at + size] != sent[at : at + size] for one in made)
        ]
        if not wrong:
            return ""
        return (
            f"{len(wrong)} of {len(checked)} checked blocks differ, the first is block "
            f"{blocks[wrong[0]] // pieces}, number {wrong[0]} of the {len(blocks)} written"
        )

    def _complain(self, verify: Verify, prefill_instance: str, wrong: str) -> None:
        """Log a wrong digest.

        The prefill worker's later claims are not refused: a job that it has pulled reaches no other
        worker."""
        self._mismatches[prefill_instance] += 1
        logger.error(
            "%s: KV of job %s attempt %d, written by %s, does not match its digest (%s); "
            "prefilling here",
            Outcome.DIGEST_MISMATCH.value, verify.job_id, verify.attempt, prefill_instance, wrong,
            extra=log.ids(job_id=verify.job_id, attempt=verify.attempt),
        )  # fmt: skip
        if (times := self._mismatches[prefill_instance]) >= SUSPECT:
            logger.error(
                "%d digest mismatches from %s so far: check its memory, and remove it with "
                "`pullfill drain %s`",
                times, prefill_instance, prefill_instance,
            )  # fmt: skip


def verifier_for(
    ledger: Ledger, memories: Sequence[LocalMemory], block_size: int
) -> Verifier | None:
    """Return a verifier, or None if digests are off or no peer can write here."""
    if not memories or ledger.kv_digest is DigestMode.OFF:
        return None
    return Verifier(ledger, memories, block_size)
