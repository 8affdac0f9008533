"""The conditional router: local or remote prefill, as a pure function with its reason.

`decide` sees everything it may look at in `Situation`; it does no I/O and keeps no state. Order
matters: first what makes remote impossible, then the policy, then length and load.
"""

from __future__ import annotations

from dataclasses import dataclass

from pullfill.wire import RouterConfig, RouterPolicy

QUEUE_FULL = "queue_full"
QUEUE_UNAVAILABLE = "queue_unavailable"
NO_PREFILL_WORKER = "no_prefill_worker"
CLAIMS_STALLED = "claims_stalled"
SELF_CHECK_PENDING = "self_check_pending"
SELF_CHECK_FAILED = "self_check_failed"


@dataclass(frozen=True, slots=True)
class Situation:
    """What the decode scheduler knows about one request at decision time.

    prompt_tokens: all tokens of the prompt. hit_tokens: leading ones in the local prefix cache.
    ineligible: why this request can never go remote ("" if it can). remote_kv: share of the KV
    cache that open remote prefills would bind with this one. claims_stalled: jobs were queued and
    nobody claimed them (breaker.py). prefill_workers: those that pull and may bring KV. self_check:
    why none may that could ("" if there is no such reason).
    """

    prompt_tokens: int
    hit_tokens: int
    ineligible: str = ""
    prefill_workers: int = 0
    self_check: str = ""
    queue_available: bool = False
    claims_stalled: bool = False
    queue_jobs: int = 0
    quarantine_full: bool = False
    remote_kv: float = 0.0
    draining: bool = False

    @property
    def remote_tokens(self) -> int:
        """Tokens a prefill worker would compute: all beyond the hit but the last, which decode
        computes itself to sample from it."""
        return max(0, self.prompt_tokens - 1 - self.hit_tokens)


@dataclass(frozen=True, slots=True)
class Decision:
    """remote False: prefill here. `reason` is a metric label: a small fixed set of words."""

    remote: bool
    reason: str


def decide(now: Situation, config: RouterConfig) -> Decision:
    """Where to prefill. Pure."""
    if now.ineligible:
        return Decision(False, now.ineligible)
    if config.policy is RouterPolicy.ALWAYS_LOCAL:
        return Decision(False, "policy_always_local")
    if now.remote_tokens == 0:
        return Decision(False, "prefix_hit" if now.hit_tokens else "short_prompt")
    always = config.policy is RouterPolicy.ALWAYS_REMOTE
    if not always and now.prompt_tokens - now.hit_tokens <= config.max_local_prefill_length:
        return Decision(False, "prefix_hit" if now.hit_tokens else "short_prompt")
    if now.draining:
        return Decision(False, "draining")
    # First the queue: while it is away no prefill worker pulls either.
    if not now.queue_available:
        return Decision(False, QUEUE_UNAVAILABLE)
    if now.prefill_workers == 0:
        return Decision(False, now.self_check or NO_PREFILL_WORKER)
    if now.claims_stalled:
        return Decision(False, CLAIMS_STALLED)
    if now.quarantine_full:
        return Decision(False, "quarantine_full")
    if now.queue_jobs >= config.max_prefill_queue_size:
        return Decision(False, QUEUE_FULL)
    if now.remote_kv > config.max_remote_kv_fraction:
        return Decision(False, "remote_full")
    return Decision(True, "policy_always_remote" if always else "long_prompt")
