"""Small makers and menders of vLLM's EngineCore structs, so that rooms need not import vLLM."""

from __future__ import annotations

from typing import Any


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


def error_outputs(request_id: str) -> Any:
    """EngineCoreOutputs that end one request with an error."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    return EngineCoreOutputs(
        outputs=[
            EngineCoreOutput(
                request_id=request_id, new_token_ids=[], finish_reason=FinishReason.ERROR
            )
        ]
    )


def utility_outputs(call_id: int, result: Any, failure: str | None) -> Any:
    """EngineCoreOutputs that answer one utility call."""
    from vllm.v1.engine import EngineCoreOutputs, UtilityOutput
    from vllm.v1.serial_utils import UtilityResult

    answer = UtilityOutput(call_id, failure)
    if failure is None:
        answer.result = UtilityResult(result)
    return EngineCoreOutputs(utility_output=answer)
