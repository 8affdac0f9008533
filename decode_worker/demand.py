"""Measures what decides how many workers of each role are needed: `pullfill plan`, autoscalers.

A prompt *wants* a prefill worker if it is sent to one, or if it is long enough for one and stays
here because there are no prefill workers, or too few.

The pressure says how full this worker is. At 1 it should get no more streams. It is the largest of
streams (time between two tokens, divided by `router.itl_ms`), kv (share of the KV blocks that
requests hold) and seats (number of requests, divided by `--max-num-seqs`).

The engine thread writes. Any thread may read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.decode_worker.forecast import ASSUMED_TOKENS_PER_S
from pullfill.decode_worker.rules import COST_LOCAL, LACK, Decision, Situation
from pullfill.snapshot import Demand
from pullfill.wire import Load, RouterPolicy

# Tokens count for so long, so a scrape every few seconds sees all of them.
WINDOW_S = 30.0
# Short prompts count for at most this share of the time, so that the division stays finite.
_FULL = 0.9


@dataclass(slots=True)
class _Bucket:
    """What was noted in one second."""

    at: float
    tokens: int = 0  # tokens to compute of prompts that wanted a prefill worker
    prompts: int = 0  # number of prompts that wanted a prefill worker
    kept: int = 0  # tokens to compute of those that stayed as there was no prefill worker
    missed: int = 0  # number of prompts that wanted a prefill worker and were computed here
    here_s: float = 0.0  # seconds of computation of all other prompts
    # Seconds with streams, each multiplied by the time between two tokens and divided by the target
    # of that time.
    streams_s: float = 0.0


class DemandMeter:
    """Counts the last WINDOW_S of one decode worker."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: deque[_Bucket] = deque()
        self._each = 0.0

    def decided(self, now: Situation, decision: Decision, here_s: float) -> None:
        """Note a decision that counts.

        here_s: expected seconds of computation, if the prompt is computed here."""
        lacks = decision.reason in LACK
        stays = lacks or decision.reason == COST_LOCAL
        long = now.config.policy is RouterPolicy.ALWAYS_REMOTE or now.long
        tokens = now.remote_tokens
        with self._lock:
            bucket = self._now()
            if decision.remote or (stays and long):
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

        gap_s: how long it would have taken without prompts. target_s: `router.itl_ms`."""
        with self._lock:
            self._now().streams_s += seconds * gap_s / target_s

    def _now(self) -> _Bucket:
        now = self._clock.monotonic()
        if not self._buckets or now - self._buckets[-1].at >= WINDOW_S / 30:
            while self._buckets and now - self._buckets[0].at >= WINDOW_S:
                self._buckets.popleft()
            self._buckets.append(_Bucket(now))
        return self._buckets[-1]

    def figures(
        self,
        *,
        open_tokens: int,
        queued_tokens: int,
        pulling: Sequence[Load],
        connected: bool,
        own_rate: float,
        kv: float,
        seats: float,
    ) -> Demand:
        """Return what this worker tells of itself.

        open_tokens: tokens of its jobs that prefill workers have still to compute.
        queued_tokens: tokens that this worker has to compute, with jobs that nobody has claimed.
        pulling: the loads of the prefill workers that pull.
        connected: whether there are prefill workers. They may be busy.
        own_rate: tokens per second of this engine. 0: not measured. A prefill worker is taken to be
        as fast as long as none has told its rate.
        kv, seats: see the module."""
        rates = [load.tokens_per_s for load in pulling if load.tokens_per_s > 0]
        with self._lock:
            now = self._clock.monotonic()
            buckets = [bucket for bucket in self._buckets if now - bucket.at < WINDOW_S]
            if rates:
                self._each = sum(rates) / len(rates)
            each = self._each
        each = each or own_rate or ASSUMED_TOKENS_PER_S
        tokens = sum(b.tokens for b in buckets)
        kept = 0 if connected else sum(b.kept for b in buckets)
        here = sum(b.here_s for b in buckets) / WINDOW_S
        streams = sum(b.streams_s for b in buckets) / WINDOW_S / (1.0 - min(here, _FULL))
        return Demand(
            backlog_s=(open_tokens + kept) / (each * max(1, len(pulling))),
            queued_s=queued_tokens / (own_rate or each),
            prefill_demand=tokens / WINDOW_S / each,
            tokens_per_s=each,
            prompts=sum(b.prompts for b in buckets),
            missed=sum(b.missed for b in buckets),
            pressure=max(streams, here, kv, seats),
            streams=max(streams, here),
            kv=kv,
            seats=seats,
        )
