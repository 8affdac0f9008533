"""vLLM 0.31."""

from __future__ import annotations

from typing import Any

from pullfill.engine.release import v0_32


class Release(v0_32.Release):
    """Hits are not counted by source. No method makes the StructuredOutputsConfig. All requests ask
    for a watermark, also if the engine makes none."""

    def structured_outputs(self, args: Any) -> Any:
        config = args.structured_outputs_config
        for flag in ("reasoning_parser", "reasoning_parser_plugin"):
            if value := getattr(args, flag):
                setattr(config, flag, value)
        return config

    def settle_watermark(self, params: Any, config: Any) -> None:
        if config.watermark_config is None:
            params.watermarking = False
