"""Speculative decoding: what it changes for a remote prefill.

A drafter proposes the next tokens of an answer, and the model keeps those that it would have said
itself. Some drafters look at tokens only (n-gram, suffix). Then KV is the same with and without
speculation, and the two workers may differ in it.

Other drafters (EAGLE, MTP, a draft model) have KV of their own, in further layers of the same
blocks. pullfill does not move that KV yet. Without it a drafter would not see the prompt, and fewer
drafts would be accepted. So the decode worker prefills every prompt.
"""

from __future__ import annotations

from typing import Any

from pullfill.errors import BadMessage

# vLLM's names of methods, as in `--speculative-config`.
_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
# Why workers with such layers refuse to speculate on CPU.
STATES_ON_CPU = (
    "vLLM's CPU build answers wrong, or fails, if it speculates with Mamba or linear attention"
)
# vLLM's own bound: it takes a smaller min_p, or temperature, for 0.
_NEGLIGIBLE = 1e-5


def local_tokens(vllm_config: Any) -> int:
    """Return how many tokens at the end of each prompt the decode worker computes itself."""
    if vllm_config.speculative_config is None:
        return 1  # the last one, to sample from it
    # If one token is left, vLLM pads it with drafts that are always rejected (`pad_spec_decode` in
    # its scheduler). They would count as drafts, and cost more than a second token of the prompt.
    return 2


def why_local(vllm_config: Any) -> str:
    """Return why every prompt is prefilled by the decode worker. Empty: there is no reason."""
    config = vllm_config.speculative_config
    if config is None or config.method in _WITHOUT_KV:
        return ""
    return f"pullfill does not move the KV of {config.method} drafts yet"


def compile_drafter(core: Any) -> None:
    """Compile what vLLM looks n-grams up with, in each rank. Takes seconds. Engine thread.

    Call it before the first step. vLLM means to compile this when it makes the drafter, but it does
    so with requests that have no sampled token, and those it skips. So the first sampled token
    would wait for the compiler. That is a token of the self-check.

    core: vLLM's EngineCore."""
    config = core.vllm_config.speculative_config
    if config is not None and config.method == "ngram":
        core.collective_rpc(_look_up, args=(config.num_speculative_tokens,))


def _look_up(worker: Any, most: int) -> None:
    """Propose once for an empty prompt, in a rank's process."""
    # The runner's own arrays: numba compiles anew for other types. vLLM's runner for GPUs looks
    # n-grams up on the GPU and has no such drafter.
    runner = worker.model_runner  # vllm.v1.worker.gpu_model_runner, its CPU runner inherits from it
    if getattr(runner, "drafter", None) is None:
        return
    tokens = runner.input_batch.num_tokens_no_spec, runner.input_batch.token_ids_cpu
    # drafter: vllm.v1.spec_decode.ngram_proposer
    runner.drafter.propose(most, [[0]], *tokens)


def check_params(vllm_config: Any, params: Any) -> None:
    """Refuse sampling parameters with which vLLM answers wrong when it speculates.

    Raises BadMessage. vLLM makes a part of this check in the frontend, which may not know that the
    workers speculate.

    params: vLLM's SamplingParams, or None."""
    if vllm_config.speculative_config is None or params is None:
        return
    if params.min_p > _NEGLIGIBLE or params.logit_bias or params.trace_decode_token_ids:
        raise BadMessage(
            "min_p, logit_bias and trace_decode_token_ids are not supported with speculative "
            "decoding, which this decode worker uses (--speculative-config)"
        )
    if vllm_config.device_config.device_type == "cpu" and params.temperature >= _NEGLIGIBLE:
        # `expand_kernel_impl` of vLLM's CPU build writes into a copy. So drafts of all requests in
        # the step, greedy ones too, are judged by a temperature that is never set.
        raise BadMessage(
            "temperature above 0 is not supported with speculative decoding on CPU: set it to 0, "
            "or start the decode workers without --speculative-config"
        )
