"""Makes and changes vLLM's engine requests and outputs, so that rooms need not import vLLM."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from pullfill.engine import front_wire
from pullfill.engine.blame import Fault
from pullfill.engine.environment import untrack
from pullfill.wire import u32

# Longer prompts, in tokens, are kept from the garbage collector.
UNTRACKED = 256

# The client index of requests that a worker sends its own engine, and the first one of a frontend.
# The API servers of stock vLLM count from 0.
OWN_CLIENT, FRONTENDS = -1, 1 << 16


@cache
def statuses() -> Any:
    """vLLM's RequestStatus. Cached, since even a repeated `import` is slow for a step."""
    from vllm.v1.request import RequestStatus

    return RequestStatus


def own_request(
    request_id: str,
    token_ids: Sequence[int],
    *,
    cache_salt: str | None,
    arrival_time: float,
    priority: int = 0,
    ttft_ms: float | None = None,
    logprobs: int | None = None,
    lora_request: Any = None,
    mm_features: Sequence[Any] = (),
) -> Any:
    """Return an EngineCoreRequest that computes the KV of `token_ids` and samples one token.

    Sampling parameters of the user never come here.

    ttft_ms: its target, as a client would name it (request_limits.py). None: the usual one.
    logprobs: how many of the most likely tokens get a log probability."""
    from vllm.v1.engine import EngineCoreRequest

    params = copy.copy(_one_token(logprobs))
    if ttft_ms is not None:
        params.extra_args = {"ttft_ms": ttft_ms}
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(token_ids),
        mm_features=list(mm_features) or None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=arrival_time,
        lora_request=lora_request,
        cache_salt=cache_salt,
        data_parallel_rank=None,
        client_index=OWN_CLIENT,
        priority=priority,
    )


@cache
def _one_token(logprobs: int | None) -> Any:
    """SamplingParams of these requests. Made once: vLLM checks all their fields."""
    from vllm.sampling_params import SamplingParams

    return SamplingParams(
        max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=logprobs
    )


def prepare(core: Any, request: Any, tokens: memoryview) -> Any:
    """Make vLLM's Request with all its block hashes. Any thread. Takes 40 ms for 128k tokens.

    core: vLLM's EngineCore.
    request: the EngineCoreRequest without its prompt.
    tokens: the prompt as u32.
    """
    if tokens:  # else vLLM would take a prompt of embeddings for one without tokens
        request.prompt_token_ids = u32.unpack(tokens)
    made, _ = core.preprocess_add_request(request)
    # For a shorter prompt this costs more than it saves.
    if len(tokens) > 4 * UNTRACKED:
        for plain in (request.prompt_token_ids, made._all_token_ids, made.block_hashes):
            untrack(plain)
    return made


def count_as_computed(request: Any, tokens: int) -> None:
    """Count external tokens of a request as computed here, not as found in a cache.

    Call it when vLLM has scheduled the request for the first time, before its first output. From
    the number of cached tokens vLLM then finds how many the prompt has added to the prefix cache.

    request: vLLM's Request."""
    stats = request.prefill_stats
    if stats is not None:
        stats.num_cached_tokens -= tokens


def correct_cached_tokens(output: Any, offloaded: Callable[[str], int] = lambda _: 0) -> None:
    """Count only the local prefix hit as cached, not the tokens that a prefill worker computed.

    The number of external tokens stays for vLLM's metrics.

    offloaded: returns how much of a request's hit came from vLLM's own KV offloading."""
    stats = output.prefill_stats
    if stats is not None and stats.num_external_cached_tokens:
        found = offloaded(output.request_id)
        stats.num_cached_tokens = stats.num_local_cached_tokens + found


def error_outputs(request_id: str, why: str, fault: Fault = Fault.REQUEST) -> Any:
    """EngineCoreOutputs that end one request with an error. why: for the user."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    return EngineCoreOutputs(
        outputs=[
            EngineCoreOutput(
                request_id=request_id,
                new_token_ids=[],
                finish_reason=FinishReason.ERROR,
                stop_reason=why,
                kv_transfer_params=front_wire.fault_mark(fault),
            )
        ]
    )


def bound_grammar(request: Any, core: Any) -> bool:
    """Whether a vLLM Request has structured output. If so, bounds its grammar (grammars.py)."""
    if getattr(request, "structured_output_request", None) is None:
        return False
    from pullfill.engine import grammars

    grammars.bound(request, core)
    return True


def explain_error(output: Any, request: Any) -> None:
    """If an output ends a request with structured output with an error, say why in `stop_reason`.
    vLLM itself tells clients nothing. request: vLLM's Request."""
    from pullfill.engine import grammars

    if output.finish_reason == front_wire.ERROR:
        output.stop_reason = grammars.why_ended(request)


def names_of(request_id: str) -> tuple[str, str, str]:
    """Return by which ids a request of vLLM's own server is known: the `id` of its answer, its
    X-Request-Id, and this one.

    `1_cmpl-x-0-1234abcd`, the second choice of the first prompt, is of the answer `cmpl-x`."""
    answer = re.sub(r"\A\d+_|-[0-9a-f]{8}\Z", "", request_id)
    if answer.startswith("cmpl-"):
        answer = re.sub(r"-(\d+|[0-9a-f]{32}-beam-\d+)\Z", "", answer)
    return answer, answer.partition("-")[2], request_id


def end_of(request: Any) -> str:
    """Return how a vLLM Request has ended: `answered`, `failed`, or `cancelled` by its client.
    Empty: that is not known."""
    reason = str(request.get_finished_reason())
    if reason == "abort":
        # vLLM's server also aborts a request when it finds a stop string.
        return "" if getattr(request.sampling_params, "stop", None) else "cancelled"
    return "failed" if reason == "error" else "answered"


def utility_outputs(call_id: int, result: Any, failure: str | None) -> Any:
    """EngineCoreOutputs that answer one utility call."""
    from vllm.v1.engine import EngineCoreOutputs, UtilityOutput
    from vllm.v1.serial_utils import UtilityResult

    answer = UtilityOutput(call_id, failure)
    if failure is None:
        answer.result = UtilityResult(result)
    return EngineCoreOutputs(utility_output=answer)
