"""vLLM 0.32, the newest release."""

from __future__ import annotations

from typing import Any


class Release:
    """What pullfill does with vLLM in another way from release to release.

    prompt_logprobs: the SamplingParams that ask for log probabilities of the prompt.
    speculates_on_cpu: whether an engine on CPU survives its first draft.
    offloads_kv: whether vLLM's KV offloading beside our connector is tested.
    seats: vLLM's name for the most requests that its scheduler lets run at once.
    held: its name for the queue of requests that wait and have blocks."""

    speculates_on_cpu = True
    offloads_kv = True
    seats = "max_num_active_reqs"
    held = "kv_holding_waiting"

    prompt_logprobs: tuple[str, ...] = (
        "prompt_logprobs",
        "prompt_logprob_token_ids",
        "prompt_logprob_start",
    )

    def structured_outputs(self, args: Any) -> Any:
        """Return the StructuredOutputsConfig of vLLM's EngineArgs."""
        return args.create_structured_outputs_config()

    def settle_watermark(self, params: Any, config: Any) -> None:
        """Say in a request's SamplingParams whether it gets a watermark. Frontends call it.

        config: the frontend's VllmConfig."""
        # vLLM's input processor does it.

    def takes_features(self, model_config: Any) -> bool:
        """Whether an engine with vLLM's ModelConfig takes inputs other than text."""
        return bool(model_config.supports_multimodal_inputs)

    def memory_pool(self, what: str) -> Any:
        """Return a context in which a worker allocates memory. None: vLLM's own.

        what: vLLM's word for that memory."""
        return None  # vLLM asks the connector for the pool of the KV cache
