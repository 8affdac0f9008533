"""The conditional router: decides between local and remote prefill, and gives the reason.

`decide` is a pure function of a `Situation` and the settings. The order of its checks matters:
first what makes a remote prefill impossible, then the policy, then length and load.

Its arguments and results are msgspec structs, because a frozen dataclass takes ten times as long to
make.
"""

from __future__ import annotations

import msgspec

from pullfill.wire import Expected, RouterConfig, RouterPolicy

PREFIX_HIT = "prefix_hit"
QUEUE_FULL = "queue_full"
QUEUE_WAIT = "queue_wait"
QUEUE_UNAVAILABLE = "queue_unavailable"
NO_PREFILL_WORKER = "no_prefill_worker"
CLAIMS_STALLED = "claims_stalled"
JOB_TOO_LARGE = "job_too_large"
PROMPT_TOO_LONG = "prompt_too_long"
SELF_CHECK_PENDING = "self_check_pending"
SELF_CHECK_FAILED = "self_check_failed"
SLOW_LINK = "slow_link"
REMOTE_FULL = "remote_full"
BY_FORECAST = frozenset({QUEUE_FULL, QUEUE_WAIT, SLOW_LINK, REMOTE_FULL})
"""Reasons for a local prefill although a prefill worker could have taken the job."""


SLOW_TIMES = 3.0
"""If writing the KV takes this many times as long as computing the prompt, the prefill stays local.
A local prefill computes as long as a remote one, but delays the streams that run here."""
SLOW_S = 1.0
"""A remote prefill whose KV is written within this time is not kept local for a slow link. So short
prompts measure the link again and again."""
MAX_TIMEOUT_S = 3600.0


class Forecast(msgspec.Struct, frozen=True):
    """How long one remote prefill is expected to take (forecast.py), in seconds. 0: unknown.

    wait_s: in the queue.
    prefill_s: the computation by a prefill worker.
    write_s: the writing of the KV, which happens during the computation.
    claim_within_s, commit_within_s: the least time, from the moment it is queued, that the
    deadlines for its claim and its commit must allow.
    """

    wait_s: float = 0.0
    prefill_s: float = 0.0
    write_s: float = 0.0
    claim_within_s: float = 0.0
    commit_within_s: float = 0.0


class Situation(msgspec.Struct, frozen=True):
    """What the decode scheduler knows about one request at decision time.

    prompt_tokens: all tokens of the prompt.
    hit_tokens: its leading tokens that are in the local prefix cache.
    local_tokens: its last tokens, which this worker always computes itself.
    ineligible: why this request can never go remote. Empty: it can.
    queue_jobs: jobs that wait, without those in work.
    remote_kv: share of the KV cache that open remote prefills would hold, this one included.
    claims_stalled: jobs were queued and nobody claimed them (breaker.py).
    prefill_workers: number of prefill workers that pull and may bring KV.
    oversize: why no prefill worker can get a prompt of this length. Empty: one can.
    self_check: why the self-check lets no prefill worker bring KV. Empty: there is no such reason.
    pullers: instance ids of the prefill workers that pull and are connected.
    pool: number of prefill workers that pull.
    ahead_jobs, ahead_tokens: jobs in front of a new one, those in work included, and their tokens
    that are not computed yet.
    kv_bytes: bytes of KV that a prefill worker would write.
    """

    prompt_tokens: int
    hit_tokens: int
    ineligible: str = ""
    local_tokens: int = 1
    prefill_workers: int = 0
    self_check: str = ""
    oversize: str = ""
    queue_available: bool = False
    claims_stalled: bool = False
    queue_jobs: int = 0
    quarantine_full: bool = False
    remote_kv: float = 0.0
    draining: bool = False
    forecast: Forecast = Forecast()
    pullers: tuple[str, ...] = ()
    pool: int = 0
    ahead_jobs: int = 0
    ahead_tokens: int = 0
    kv_bytes: float = 0.0

    @property
    def remote_tokens(self) -> int:
        """Tokens a prefill worker would compute: all between the hit and `local_tokens`."""
        return max(0, self.prompt_tokens - self.local_tokens - self.hit_tokens)


class Decision(msgspec.Struct, frozen=True):
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
        return Decision(False, PREFIX_HIT if now.hit_tokens else "short_prompt")
    always = config.policy is RouterPolicy.ALWAYS_REMOTE
    # With the policy `cost`, CostRouter.place compares lengths and rates.
    costs = config.policy is RouterPolicy.COST
    if not (always or costs) and not (short := by_length(now, config)).remote:
        return short
    if now.draining:
        return Decision(False, "draining")
    # The queue comes first, because while it is away no prefill worker pulls either.
    if not now.queue_available:
        return Decision(False, QUEUE_UNAVAILABLE)
    if now.prefill_workers == 0:
        return Decision(False, now.self_check or NO_PREFILL_WORKER)
    if now.oversize:
        return Decision(False, now.oversize)
    if now.claims_stalled:
        return Decision(False, CLAIMS_STALLED)
    if now.quarantine_full:
        return Decision(False, "quarantine_full")
    if now.queue_jobs >= config.max_prefill_queue_size:
        return Decision(False, QUEUE_FULL)
    if now.forecast.wait_s > config.max_queue_wait_s:
        return Decision(False, QUEUE_WAIT)
    if _slow_link(now.forecast, costs):
        return Decision(False, SLOW_LINK)
    if now.remote_kv > config.max_remote_kv_fraction:
        return Decision(False, REMOTE_FULL)
    return Decision(True, "policy_always_remote" if always else "long_prompt")


def by_length(now: Situation, config: RouterConfig) -> Decision:
    """Where to prefill by the length beyond the hit alone. Pure."""
    if now.prompt_tokens - now.hit_tokens <= config.max_local_prefill_length:
        return Decision(False, PREFIX_HIT if now.hit_tokens else "short_prompt")
    return Decision(True, "long_prompt")


def _slow_link(forecast: Forecast, counted: bool) -> bool:
    """counted: the time of writing is part of a prediction, so it does not decide alone."""
    slow = not counted and 0 < SLOW_TIMES * forecast.prefill_s < forecast.write_s
    return (slow and forecast.write_s > SLOW_S) or forecast.commit_within_s > MAX_TIMEOUT_S


def timeouts(forecast: Forecast, config: RouterConfig) -> tuple[float, float]:
    """Return (remote, claim): how long a job may take until its commit, and until its claim.

    It gets at least what the settings say, and more if the forecast is longer. Pure."""
    remote = max(config.remote_timeout_s, forecast.commit_within_s)
    return min(remote, MAX_TIMEOUT_S), max(config.claim_timeout_s, forecast.claim_within_s)


def expected(now: Situation, decision: Decision, config: RouterConfig) -> Expected | None:
    """Return what `pullfill explain` shows of the forecast. Pure.

    None if the decision did not depend on it."""
    if not decision.remote and decision.reason not in BY_FORECAST:
        return None
    forecast, (remote, claim) = now.forecast, timeouts(now.forecast, config)
    return Expected(
        queue=forecast.wait_s if forecast.wait_s or forecast.prefill_s else None,
        prefill=forecast.prefill_s or None,
        kv_write=forecast.write_s or None,
        claim_timeout=claim,
        timeout=remote,
    )
