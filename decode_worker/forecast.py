"""Forecasts how long a remote prefill takes, from the reports of prefill workers and past commits.

For the decision three times are added: the wait in the queue, the computation, and the writing of
the KV. The wait is the longer of two: the tokens in front of the prompt, over the tokens per second
of all prefill workers that pull; and the KV in front of it that is not written yet, over the rate
of the link. What is not measured yet counts as 0, so the first prompts go out.

For deadlines the sum is doubled, the slowest link counts, and assumed rates replace what is not
measured. A deadline that is too long costs little: a worker that dies or falls silent is noticed by
its connection.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.decode_worker.rules import Forecast
from pullfill.wire import Load

MARGIN = 2.0
"""A deadline is this many times the expected time."""
ASSUMED_TOKENS_PER_S = 2_000.0
ASSUMED_BYTES_PER_S = 125e6
"""The rate of a link that is not measured yet: 1 Gbit/s."""
FORGET_S = 300.0
"""How long a measured link counts for decisions. After a bad measurement no job would go there and
measure it again."""
REMEMBER_S = 3600.0
"""How long a measured link counts for deadlines. Its worker may be gone by then."""
_WRITES = 8
"""How many of the last writes over a link are kept. Their median counts, so a single slow one does
not matter."""
_SURE = 3
"""Decisions ignore a link with fewer writes. Otherwise a single slow one would keep all long
prompts local for FORGET_S."""
_MOST_LINKS = 4096


@dataclass(slots=True)
class _Link:
    """The link to one prefill worker. writes: seconds per block, of the last writes."""

    writes: deque[float] = field(default_factory=lambda: deque(maxlen=_WRITES))
    per_block_s: float = 0.0
    at: float = 0.0


class Forecaster:
    """See the module. Call `wrote` on the asyncio thread and `forecast` on the engine thread."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._links: dict[str, _Link] = {}

    def wrote(self, instance_id: str, blocks: int, seconds: float) -> None:
        """Note that a prefill worker has written `blocks` blocks in `seconds`."""
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
        pulling: Collection[str] | None = None,
    ) -> Forecast:
        """Forecast the remote prefill of one prompt.

        tokens, blocks, kv_bytes: how much of the prompt must be computed and written.
        workers: number of prefill workers that pull.
        loads: the reports of those that are connected.
        depth_tokens: tokens of all jobs in the queue, including those in work.
        own_tokens: tokens of our own jobs that nobody has claimed.
        own_unwritten: blocks of claimed jobs of ours that are not written yet.
        pulling: instance ids of the prefill workers that may get the job. Decisions count no other
        links: a slow one may be of a worker that is gone. None: all links.
        """
        rates = [load.tokens_per_s for load in loads if load.tokens_per_s > 0]
        each = sum(rates) / len(rates) if rates else 0.0
        done = sum(load.done_tokens for load in loads)
        if workers > len(loads) > 0:
            done = done * workers // len(loads)
        ahead = max(depth_tokens - done, own_tokens, 0)
        now = self._clock.monotonic()
        known = [(n, link) for n, link in list(self._links.items()) if link.at > now - REMEMBER_S]
        links, since = [link for _, link in known], now - FORGET_S
        recent = [
            link.per_block_s
            for name, link in known
            if link.at > since
            and len(link.writes) >= _SURE
            and (pulling is None or name in pulling)
        ]
        per_block_s = sum(recent) / len(recent) if recent else 0.0
        wait_s = ahead / (each * workers) if each and workers else 0.0
        # KV that is computed but not written yet is also in front of it. It delays the job in the
        # prefill worker, or before it, while the worker has no credit left for us (credits.py).
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
