"""Where a prompt is prefilled, and why.

The scheduler (scheduler.py) calls `decide` for each prompt. It walks RULES in order. The first rule
that answers has decided. `pullfill explain` shows its reason: the name of the rule, where its
docstring names no others. A policy is a rule too. So a new reason is a new entry of OF_THE_REQUEST
or OF_THE_CLUSTER.

A rule is a pure function of vLLM's Request and the `Situation`. It answers None if it does not
apply. Rules run on the engine thread. Arguments and results are msgspec structs, because a frozen
dataclass takes ten times as long to make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pullfill.decode_worker.cost import PROBE_TOKENS, Prefill
from pullfill.decode_worker.forecast import MAX_TIMEOUT_S, Forecast, timeouts
from pullfill.engine import features
from pullfill.wire import MAX_TEXT, Adapter, Expected, RouterConfig, RouterPolicy

PREFIX_HIT = "prefix_hit"
# The prefill is cheaper here than at a prefill worker.
COST_LOCAL = "cost_local"
SELF_CHECK_PENDING = "self_check_pending"
SELF_CHECK_FAILED = "self_check_failed"
JOB_TOO_LARGE = "job_too_large"
PROMPT_TOO_LONG = "prompt_too_long"
# Reasons for a local prefill that a shorter queue would remove. The queue is then counted anew.
ENOUGH = frozenset({"queue_full", "queue_wait"})
# Reasons for a local prefill with which `pullfill explain` shows the forecast. A prefill worker
# could have taken the job, but late, or at the cost of other prompts.
BY_FORECAST = ENOUGH | {"slow_link", "remote_full"}
# Reasons for a local prefill that may come from a server that is away. `pullfill explain` then
# says which one is.
BY_OUTAGE = frozenset(
    {
        "claims_stalled", "no_prefill_worker", "queue_unavailable", SELF_CHECK_FAILED,
        SELF_CHECK_PENDING,
    }
)  # fmt: skip
# Reasons for a local prefill that more prefill workers would remove (demand.py).
LACK = ENOUGH | {"no_prefill_worker", SELF_CHECK_PENDING, "claims_stalled"}

# If writing the KV takes this many times as long as computing the prompt, the prefill stays
# local. A local prefill computes as long as a remote one, but delays the streams that run here.
SLOW_TIMES = 3.0
# A remote prefill whose KV is written within this time is not kept local for a slow link. So
# short prompts measure the link again and again.
SLOW_S = 1.0


class Situation(msgspec.Struct, frozen=True):
    """What this worker knows when it decides about one prompt."""

    prompt_tokens: int  # all tokens of the prompt
    hit_tokens: int  # its leading tokens that are in the local prefix cache
    local_tokens: int = 1  # its last tokens, which this worker always computes itself
    config: RouterConfig = RouterConfig()  # the router's settings
    # Why this engine exchanges no KV with others. Empty: it does.
    engine: str = ""
    fell_back: bool = False  # a remote prefill of this request was given up
    # The request's LoRA adapter as other workers find it. None: it has none, or none can.
    adapter: Adapter | None = None
    takes_features: bool = False  # a prefill worker that pulls takes multimodal inputs
    prefill_workers: int = 0  # number of prefill workers that pull jobs of this worker
    # Why the self-check lets no prefill worker bring KV. Empty: there is no such reason.
    self_check: str = ""
    # Why no prefill worker can get a prompt of this length. Empty: one can.
    oversize: str = ""
    queue_available: bool = False
    claims_stalled: bool = False  # jobs were queued and nobody claimed them (ledger.py)
    queue_jobs: int = 0  # jobs that wait, without those in work
    quarantine_full: bool = False
    # Share of the KV cache that open remote prefills would hold, this one included.
    remote_kv: float = 0.0
    draining: bool = False
    forecast: Forecast = Forecast()
    # What the prefill is expected to cost here and there. None: nothing was predicted.
    costs: Prefill | None = None

    @property
    def remote_tokens(self) -> int:
        """Tokens a prefill worker would compute: all between the hit and `local_tokens`."""
        return max(0, self.prompt_tokens - self.local_tokens - self.hit_tokens)

    @property
    def long(self) -> bool:
        """Whether the prompt is longer beyond the hit than what always stays here."""
        return self.prompt_tokens - self.hit_tokens > self.config.max_local_prefill_length


class Decision(msgspec.Struct, frozen=True):
    """remote False: prefill here. `reason` is a metric label: a small fixed set of words."""

    remote: bool
    reason: str
    # Name of the prefill worker's connection that gets the job. Empty: the queue gets it.
    to: str = ""


Rule = Callable[[Any, Situation], Decision | None]


def stays(reason: str, applies: Callable[[Any, Situation], object]) -> Rule:
    """Make a rule of a condition: where it holds, the prompt stays, for this reason."""
    here = Decision(False, reason)

    def rule(request: Any, now: Situation) -> Decision | None:
        return here if applies(request, now) else None

    rule.__name__ = reason
    return rule


def decide(request: Any, now: Situation) -> Decision:
    """Where to prefill. request: vLLM's Request. Pure."""
    return first(RULES, request, now) or Decision(True, "long_prompt")


def first(rules: Sequence[Rule], request: Any, now: Situation) -> Decision | None:
    """Return what the first of these rules says that answers."""
    for rule in rules:
        if (decision := rule(request, now)) is not None:
            return decision
    return None


def multimodal(request: Any, now: Situation) -> object:
    if not request.mm_features:
        return False
    # vLLM may compute features with an adapter. Nothing shows yet that prefill workers do the same.
    return (
        request.lora_request is not None
        or not now.takes_features
        or not features.may_go(request.mm_features, now.prompt_tokens - now.local_tokens)
    )


def engine(request: Any, now: Situation) -> Decision | None:
    """Reasons: speculation, kv_groups, no_transport."""
    return Decision(False, now.engine) if now.engine else None


def short(request: Any, now: Situation) -> object:
    # Length is the policy `conditional`. The others send what has one token for a prefill worker.
    conditional = now.config.policy is RouterPolicy.CONDITIONAL
    return now.remote_tokens == 0 or (conditional and not now.long)


def no_prefill_worker(request: Any, now: Situation) -> Decision | None:
    """Reasons: its name, self_check_pending, self_check_failed."""
    if now.prefill_workers:
        return None
    return Decision(False, now.self_check or "no_prefill_worker")


def slow_link(request: Any, now: Situation) -> object:
    told = now.forecast
    slow = 0 < SLOW_TIMES * told.prefill_s < told.write_s and told.write_s > SLOW_S
    return slow or told.commit_within_s > MAX_TIMEOUT_S


def policy_always_remote(request: Any, now: Situation) -> Decision | None:
    if now.config.policy is not RouterPolicy.ALWAYS_REMOTE:
        return None
    return Decision(True, "policy_always_remote")


def cost(request: Any, now: Situation) -> Decision | None:
    """Reasons: cost_probe, cost_remote, cost_local, and those of `conditional`."""
    if now.config.policy is not RouterPolicy.COST or (costs := now.costs) is None:
        return None
    if costs.probe and now.remote_tokens >= PROBE_TOKENS:
        return Decision(True, "cost_probe")
    if costs.remote is not None:
        remote = costs.remote.cost < costs.local.cost
        return Decision(remote, "cost_remote" if remote else COST_LOCAL)
    # Until the first prefill worker is measured, length decides.
    return None if now.long else Decision(False, PREFIX_HIT if now.hit_tokens else "short_prompt")


# A job holds token ids, a LoRA adapter and multimodal inputs. A prompt whose KV depends on more is
# prefilled here. These come first, as nothing changes that.
OF_THE_REQUEST: tuple[Rule, ...] = (
    stays("resumed", lambda request, now: request.num_output_tokens or request.num_preemptions),
    stays("fallback", lambda request, now: now.fell_back),
    # vLLM wants the logits of each token then, and a prefill worker brings KV only.
    stays("prompt_logprobs", lambda request, now: request.skip_reading_prefix_cache),
    stays("multimodal", multimodal),
    stays(
        "prompt_embeds",
        lambda request, now: request.prompt_embeds is not None or request.prompt_token_ids is None,
    ),
    stays("lora", lambda request, now: request.lora_request is not None and now.adapter is None),
    stays("pooling", lambda request, now: request.pooling_params is not None),
    # The salt is the user's. A job with a longer one would be refused as poison.
    stays("cache_salt", lambda request, now: len(request.cache_salt or "") > MAX_TEXT),
    engine,
)
# What a prefill worker can take, and is worth it: first `policy_always_local`, then length, then
# outages and load. A policy that sends prompts away comes last, because each reason above outweighs
# it. If no rule answers, the prompt is sent away (`long_prompt`).
OF_THE_CLUSTER: tuple[Rule, ...] = (
    stays(
        "policy_always_local",
        lambda request, now: now.config.policy is RouterPolicy.ALWAYS_LOCAL,
    ),
    stays(PREFIX_HIT, lambda request, now: now.hit_tokens and short(request, now)),
    stays("short_prompt", short),
    stays("draining", lambda request, now: now.draining),
    # It comes before the prefill workers, because while NATS is away nobody pulls either.
    stays("queue_unavailable", lambda request, now: not now.queue_available),
    no_prefill_worker,
    stays(PROMPT_TOO_LONG, lambda request, now: now.oversize == PROMPT_TOO_LONG),
    stays(JOB_TOO_LARGE, lambda request, now: now.oversize == JOB_TOO_LARGE),
    stays("claims_stalled", lambda request, now: now.claims_stalled),
    stays("quarantine_full", lambda request, now: now.quarantine_full),
    stays("queue_full", lambda request, now: now.queue_jobs >= now.config.max_prefill_queue_size),
    stays("queue_wait", lambda request, now: now.forecast.wait_s > now.config.max_queue_wait_s),
    stays("slow_link", slow_link),
    stays("remote_full", lambda request, now: now.remote_kv > now.config.max_remote_kv_fraction),
    policy_always_remote,
    cost,
)
RULES = OF_THE_REQUEST + OF_THE_CLUSTER


def expected(now: Situation, decision: Decision) -> Expected | None:
    """Return what `pullfill explain` shows of the forecast. Pure.

    None if the decision did not depend on it."""
    if not decision.remote and decision.reason not in BY_FORECAST:
        return None
    forecast, (remote, claim) = now.forecast, timeouts(now.forecast, now.config)
    return Expected(
        queue=forecast.wait_s if forecast.wait_s or forecast.prefill_s else None,
        prefill=forecast.prefill_s or None,
        kv_write=forecast.write_s or None,
        claim_timeout=claim,
        timeout=remote,
    )
