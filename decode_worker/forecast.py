"""How long a remote prefill will take: what prefill workers report, and what past commits took.

Measured, for the decision: the wait in the queue (tokens in front of it, over the tokens per second
of all prefill workers that pull, or the KV in front of it that is not written yet, whichever takes
longer), the computation, and the writing of the KV. What nobody has
measured yet counts as 0 there, so the first prompts go out. For deadlines the same sum is doubled,
the slowest link counts, and assumed rates stand in for what is not measured: a deadline that is too
long costs little, since a worker that dies or falls silent is noticed by its connection.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.decode_worker.router import Forecast
from pullfill.wire import Load

MARGIN = 2.0
"""Of a deadline over what is expected."""
ASSUMED_TOKENS_PER_S = 2_000.0
ASSUMED_BYTES_PER_S = 125e6
"""A link of 1 Gbit/s."""
FORGET_S = 300.0
"""A measured link counts for decisions that long: no job would measure it again after a bad one."""
_WRITES = 8
"""The median of the last ones of a link counts: one that was held up says nothing of the next."""
_SURE = 3
"""Fewer writes of a link say nothing for decisions: one that was held up must not keep all long
prompts here until it is forgotten."""
_MOST_LINKS = 4096


@dataclass(slots=True)
class _Link:
    """To one prefill worker. writes: seconds for each block, of the last ones."""

    writes: deque[float] = field(default_factory=lambda: deque(maxlen=_WRITES))
    per_block_s: float = 0.0
    at: float = 0.0


class Forecaster:
    """`wrote` belongs to the asyncio thread, `forecast` to the engine thread."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._links: dict[str, _Link] = {}

    def wrote(self, instance_id: str, blocks: int, seconds: float) -> None:
        """A prefill worker has written that many blocks in that time."""
        if blocks <= 0 or not 0 < seconds < math.inf:
            return
        if len(self._links) >= _MOST_LINKS:
            self._links = {}
        link = self._links.setdefault(instance_id, _Link())
        link.writes.append(seconds / blocks)
        link.per_block_s = median_low(link.writes)
        link.at = self._clock.monotonic()

    def forecast(
        self,
        tokens: int,
        blocks: int,
        kv_bytes: float,
        *,
        workers: int,
        loads: Sequence[Load],
        depth_tokens: int,
        own_tokens: int,
        own_unwritten: int = 0,
    ) -> Forecast:
        """For a prompt of which `tokens` are to be computed, `blocks` with `kv_bytes`.

        workers: prefill workers that pull. loads: the reports of those that are connected.
        depth_tokens: of all jobs in the queue, those in work too. own_tokens: of our own jobs that
        nobody has claimed. own_unwritten: blocks that prefill workers have still to write for jobs
        that they hold.
        """
        rates = [load.tokens_per_s for load in loads if load.tokens_per_s > 0]
        each = sum(rates) / len(rates) if rates else 0.0
        done = sum(load.done_tokens for load in loads)
        if workers > len(loads) > 0:
            done = done * workers // len(loads)
        ahead = max(depth_tokens - done, own_tokens, 0)
        links = list(self._links.values())
        since = self._clock.monotonic() - FORGET_S
        sure_of = [link for link in links if link.at > since and len(link.writes) >= _SURE]
        recent = [link.per_block_s for link in sure_of]
        per_block_s = sum(recent) / len(recent) if recent else 0.0
        wait_s = ahead / (each * workers) if each and workers else 0.0
        # What is computed and not written yet is in front of it too, whether the prefill worker
        # takes the job at once or waits until it may compute more for us (credits.py).
        wait_s = max(wait_s, own_unwritten * per_block_s / max(1, workers))
        prefill_s = tokens / each if each else 0.0
        write_s = blocks * per_block_s
        sure = each or ASSUMED_TOKENS_PER_S
        slowest = max((link.per_block_s for link in links), default=0.0)
        wait_at_most = MARGIN * max(ahead / (sure * max(1, workers)), own_unwritten * slowest)
        write_at_most = blocks * slowest or kv_bytes / ASSUMED_BYTES_PER_S
        return Forecast(
            wait_s=wait_s,
            prefill_s=prefill_s,
            write_s=write_s,
            claim_within_s=wait_at_most,
            commit_within_s=wait_at_most + MARGIN * (tokens / sure + write_at_most),
        )
