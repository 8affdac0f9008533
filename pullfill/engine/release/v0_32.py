"""vLLM 0.32, the newest release."""

from __future__ import annotations

from typing import Any


class Release:
    """What pullfill does with vLLM in another way from release to release."""

    def structured_outputs(self, args: Any) -> Any:
        """Return the StructuredOutputsConfig of vLLM's EngineArgs."""
        return args.create_structured_outputs_config()

    def settle_watermark(self, params: Any, config: Any) -> None:
        """Say in a request's SamplingParams whether it gets a watermark. Frontends call it.

        config: the frontend's VllmConfig."""
        # vLLM's input processor does it.
