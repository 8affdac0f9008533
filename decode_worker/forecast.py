"""Forecasts how long a remote prefill takes, from the reports of prefill workers and past commits.

A forecast adds three times: the wait in the queue, the computation, and the writing of the KV. What
is not measured yet counts as 0, so the first prompts go out. For deadlines the sum is doubled, the
slowest link counts, and assumed rates replace what is not measured. A deadline that is too long
costs little: a worker that dies or falls silent is noticed by its connection.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.rate import FORGET_S, Rate
from pullfill.wire import Load, RouterConfig

# No remote prefill may take longer, whatever is expected.
MAX_TIMEOUT_S = 3600.0
# A deadline is this many times the expected time.
MARGIN = 2.0
ASSUMED_TOKENS_PER_S = 2_000.0
# The rate of a link that is not measured yet: 1 Gbit/s.
ASSUMED_BYTES_PER_S = 125e6
# How long a measured link keeps prompts here. After a bad measurement no long job would go there
# and measure it again. Each one that does may take minutes.
BELIEVE_LINK_S = 10 * FORGET_S
# Decisions ignore a link with fewer writes. Otherwise a single slow one would keep all long
# prompts local for BELIEVE_LINK_S.
_SURE = 3
# How many links are remembered.
_MOST = 4096


class Forecast(msgspec.Struct, frozen=True):
    """How long one remote prefill is expected to take, in seconds. 0: unknown."""

    ahead: int = 0  # tokens in front of it that are not computed yet
    rate: float = 0.0  # prompt tokens that one prefill worker computes in a second
    wait_s: float = 0.0  # in the queue
    prefill_s: float = 0.0  # the computation by a prefill worker
    write_s: float = 0.0  # the writing of the KV, which happens during the computation
    # claim_within_s, commit_within_s: the least time, from the moment it is queued, that the
    # deadlines for its claim and its commit must allow.
    claim_within_s: float = 0.0
    commit_within_s: float = 0.0


def timeouts(forecast: Forecast, config: RouterConfig) -> tuple[float, float]:
    """Return (remote, claim): how long a job may take until its commit, and until its claim.

    It gets at least what the settings say, and more if the forecast is longer. Pure."""
    remote = max(config.remote_timeout_s, forecast.commit_within_s)
    return min(remote, MAX_TIMEOUT_S), max(config.claim_timeout_s, forecast.claim_within_s)


class Links:
    """Measures how fast each prefill worker writes KV, and forecasts how long a write takes.

    Call `wrote` on the asyncio thread, and `forecast` on the engine thread."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._blocks: dict[str, Rate] = {}  # seconds of so many blocks, by instance id

    def wrote(self, instance_id: str, blocks: int, seconds: float) -> None:
        """Note that a prefill worker has written `blocks` blocks in `seconds`."""
        if blocks > 0 and 0 < seconds < math.inf:
            if len(self._blocks) >= _MOST:
                self._blocks = {}
            link = self._blocks.setdefault(instance_id, Rate())
            link.observe(blocks, 0.0, seconds, self._clock.monotonic())

    def forecast(
        self,
        tokens: int,
        blocks: int,
        kv_bytes: float,
        *,
        loads: Mapping[str, Load],
        done_tokens: float,
        depth_tokens: int,
        own_tokens: int,
        own_unwritten: int = 0,
    ) -> Forecast:
        """Forecast the remote prefill of one prompt.

        tokens, blocks, kv_bytes: how much of the prompt must be computed and written.
        loads: the reports of the prefill workers that pull, by instance id. Decisions count no
        other links: a slow one may be of a worker that is gone.
        done_tokens: tokens of jobs in work that are computed already.
        depth_tokens: tokens of all jobs in the queue, including those in work.
        own_tokens: tokens of our own jobs that nobody has claimed. The queue may not know them.
        own_unwritten: blocks of claimed jobs of ours that are not written yet.
        """
        rates = [load.tokens_per_s for load in loads.values() if load.tokens_per_s > 0]
        each = sum(rates) / len(rates) if rates else 0.0
        ahead = max(depth_tokens - int(done_tokens), own_tokens, 0)
        many = max(1, len(loads))
        now, slowest, links = self._clock.monotonic(), 0.0, list[float]()
        for name, link in list(self._blocks.items()):
            if link.fresh(now, MAX_TIMEOUT_S):  # its worker may be gone by then
                slowest = max(slowest, link.a)
            if name in loads and link.count >= _SURE and link.fresh(now, BELIEVE_LINK_S):
                links.append(link.a)
        per_block_s = sum(links) / len(links) if links else 0.0
        wait_s = ahead / (each * many) if each else 0.0
        # KV that is computed but not written yet is also in front of it. It delays the job in the
        # prefill worker, or before it, while the worker has no credit left for us (its `Credits`).
        wait_s = max(wait_s, own_unwritten * per_block_s / many)
        sure = each or ASSUMED_TOKENS_PER_S
        wait_at_most = MARGIN * max(ahead / (sure * many), own_unwritten * slowest)
        write_at_most = blocks * slowest or kv_bytes / ASSUMED_BYTES_PER_S
        return Forecast(
            ahead=ahead,
            rate=each,
            wait_s=wait_s,
            prefill_s=tokens / each if each else 0.0,
            write_s=blocks * per_block_s,
            claim_within_s=wait_at_most,
            commit_within_s=wait_at_most + MARGIN * (tokens / sure + write_at_most),
        )
