"""What differs between the releases of vLLM that pullfill is tested with (pullfill/releases.py).

The class of the newest release defines every method. That of an older one inherits from the release
after it and overrides what was different. `this` is that of the installed release.

Importing this does not import vLLM.
"""

from __future__ import annotations

from typing import Any

from pullfill import releases
from pullfill.engine.check import base_version, installed_builds


class V0_32:
    """What pullfill does with vLLM in another way from release to release."""

    def structured_outputs(self, args: Any) -> Any:
        """Return the StructuredOutputsConfig of vLLM's EngineArgs."""
        return args.create_structured_outputs_config()

    def settle_watermark(self, params: Any, config: Any) -> None:
        """Say in a request's SamplingParams whether it gets a watermark. Frontends call it.

        config: the frontend's VllmConfig."""
        # vLLM's input processor does it.


class V0_31(V0_32):
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


CLASSES = {"0.32": V0_32, "0.31": V0_31}


def of(version: str) -> V0_32:
    """Return what is different in a release of vLLM. version: e.g. `0.32.0`."""
    return CLASSES[version.rpartition(".")[0]]()


_installed = base_version(next(iter(installed_builds().values()), ""))
# A release that is not among them is refused at start-up, with a reason (check.py).
this = of(_installed if _installed in releases.TORCH else releases.VLLM)
