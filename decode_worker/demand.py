"""Measures what decides how many workers of each role are needed: `pullfill plan`, autoscalers.

A prompt *wants* a prefill worker if it is sent to one, or is long enough for one and stays here
because there is none, or too few. Its tokens count for WINDOW_S, so a scrape every few seconds sees
each of them.

The pressure says how full this worker is. 1: it should get no more streams. It is the largest of

    streams     time between two tokens over its target, without long prompts: they are what
                prefill workers are for
    kv          share of the KV blocks that requests hold
    seats       requests over `--max-num-seqs`

The engine thread notes, any thread reads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.cluster_status import Demand
from pullfill.decode_worker.conditional_router import (
    CLAIMS_STALLED,
    NO_PREFILL_WORKER,
    QUEUE_FULL,
    QUEUE_WAIT,
    SELF_CHECK_PENDING,
    Decision,
    Situation,
    by_length,
)
from pullfill.decode_worker.forecast import ASSUMED_TOKENS_PER_S
from pullfill.wire import RouterConfig, RouterPolicy

WINDOW_S = 30.0
_BUCKET_S = 1.0
_LACK = frozenset({NO_PREFILL_WORKER, SELF_CHECK_PENDING, CLAIMS_STALLED, QUEUE_FULL, QUEUE_WAIT})
"""Reasons for a local prefill that more prefill workers would remove."""
_BY_COST = frozenset({"cost_local", "cost_chunked"})
_FULL = 0.9
"""Short prompts never count for a larger share of the time. The division stays finite."""


@dataclass(slots=True)
class _Bucket:
    """What was noted in one second.

    tokens, prompts: those that wanted a prefill worker.
    kept: tokens of those among them that stayed because there was no prefill worker.
    missed: prompts that were computed here although they wanted a prefill worker.
    here_s: seconds of computation of the other prompts.
    streams_s: seconds with streams, each weighted by time between tokens over its target."""

    at: float
    tokens: int = 0
    prompts: int = 0
    kept: int = 0
    missed: int = 0
    here_s: float = 0.0
    streams_s: float = 0.0


class DemandMeter:
    """See the module."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: deque[_Bucket] = deque()
        self._each = 0.0

    # ------------------------------------------------------------------ engine thread

    def decided(
        self, now: Situation, decision: Decision, config: RouterConfig, here_s: float
    ) -> None:
        """Note a decision that counts.

        here_s: expected seconds of computation, if the prompt is computed here."""
        lacks = decision.reason in _LACK
        tokens = now.remote_tokens
        with self._lock:
            bucket = self._now()
            if decision.remote or ((lacks or decision.reason in _BY_COST) and _long(now, config)):
                bucket.tokens += tokens
                bucket.prompts += 1
                bucket.missed += lacks
                bucket.kept += tokens if lacks and not now.prefill_workers else 0
            else:
                bucket.here_s += here_s

    def fell_back(self) -> None:
        """Note that a remote prefill was given up. Its prompt is computed here."""
        with self._lock:
            self._now().missed += 1

    def stepped(self, seconds: float, gap_s: float, target_s: float) -> None:
        """Note a step with streams.

        gap_s: how long it would have taken without prompts. target_s: of the time between two
        tokens, the least of all streams."""
        if target_s > 0:
            with self._lock:
                self._now().streams_s += seconds * gap_s / target_s

    def _now(self) -> _Bucket:
        now = self._clock.monotonic()
        if not self._buckets or now - self._buckets[-1].at >= _BUCKET_S:
            self._forget(now)
            self._buckets.append(_Bucket(now))
        return self._buckets[-1]

    def _forget(self, now: float) -> None:
        while self._buckets and now - self._buckets[0].at >= WINDOW_S:
            self._buckets.popleft()

    # ------------------------------------------------------------------ any thread

    def figures(
        self,
        *,
        open_tokens: int,
        rates: Sequence[float],
        pool: int,
        own_rate: float,
        kv: float,
        seats: float,
    ) -> Demand:
        """Return what this worker tells of itself.

        open_tokens: tokens of its jobs that prefill workers have still to compute.
        rates: tokens per second of each connected prefill worker that has measured them.
        pool: number of prefill workers that pull.
        own_rate: tokens per second of this engine. 0: not measured. It stands for a prefill worker
        as long as none has told its rate.
        kv, seats: see the module."""
        with self._lock:
            self._forget(self._clock.monotonic())
            buckets = list(self._buckets)
            if rates:
                self._each = sum(rates) / len(rates)
            each = self._each
        each = each or own_rate or ASSUMED_TOKENS_PER_S
        tokens = sum(b.tokens for b in buckets)
        kept = 0 if pool else sum(b.kept for b in buckets)
        here = sum(b.here_s for b in buckets) / WINDOW_S
        streams = sum(b.streams_s for b in buckets) / WINDOW_S / (1.0 - min(here, _FULL))
        return Demand(
            backlog_s=(open_tokens + kept) / (each * max(1, pool)),
            prefill_demand=tokens / WINDOW_S / each,
            tokens_per_s=each,
            prompts=sum(b.prompts for b in buckets),
            missed=sum(b.missed for b in buckets),
            pressure=max(streams, here, kv, seats),
            streams=max(streams, here),
            kv=kv,
            seats=seats,
        )


def _long(now: Situation, config: RouterConfig) -> bool:
    return config.policy is RouterPolicy.ALWAYS_REMOTE or by_length(now, config).remote
