"""Small makers and menders of vLLM's EngineCore structs, so that rooms need not import vLLM."""

from __future__ import annotations

from typing import Any

_MAX_REASON = 500
"""Characters of a compiler's message that are passed on."""


def strip_transfer_params(request: Any) -> None:
    """Remove client-sent `kv_transfer_params`: only we decide how KV moves. The frontend does this
    too; a worker does not rely on it."""
    params = request.sampling_params
    if params is not None and params.extra_args:
        params.extra_args.pop("kv_transfer_params", None)


def correct_cached_tokens(output: Any) -> None:
    """Tokens that a prefill worker computed for this request are no cache hit of the user's:
    count only the local prefix hit as cached. The external count stays for vLLM's metrics."""
    stats = output.prefill_stats
    if stats is not None and stats.num_external_cached_tokens:
        stats.num_cached_tokens = stats.num_local_cached_tokens


def error_outputs(request_id: str, why: str) -> Any:
    """EngineCoreOutputs that end one request with an error. why: for the user."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    return EngineCoreOutputs(
        outputs=[
            EngineCoreOutput(
                request_id=request_id,
                new_token_ids=[],
                finish_reason=FinishReason.ERROR,
                stop_reason=why,
            )
        ]
    )


def has_grammar(request: Any) -> bool:
    """Whether a vLLM Request has structured output."""
    return getattr(request, "structured_output_request", None) is not None


def explain_error(output: Any, request: Any) -> None:
    """If an output ends a request with an error, and its structured output is the reason, say so in
    `stop_reason`. vLLM itself tells clients nothing. request: vLLM's Request with a grammar."""
    from vllm.v1.engine import FinishReason

    if output.finish_reason != FinishReason.ERROR:
        return
    grammar = request.structured_output_request.grammar
    if isinstance(grammar, Exception):
        text = " ".join(str(grammar).split())[:_MAX_REASON] or type(grammar).__name__
        output.stop_reason = f"the structured output of the request does not compile: {text}"
    else:
        output.stop_reason = (
            "the structured output of the request allows no token after "
            f"{max(0, request.num_output_tokens - 1)} tokens of the answer: no text matches it"
        )


def utility_outputs(call_id: int, result: Any, failure: str | None) -> Any:
    """EngineCoreOutputs that answer one utility call."""
    from vllm.v1.engine import EngineCoreOutputs, UtilityOutput
    from vllm.v1.serial_utils import UtilityResult

    answer = UtilityOutput(call_id, failure)
    if failure is None:
        answer.result = UtilityResult(result)
    return EngineCoreOutputs(utility_output=answer)
