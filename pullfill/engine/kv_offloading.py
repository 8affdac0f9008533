"""The user's flags for vLLM's own KV offloading, which adds a second KV cache to a worker.

vLLM would replace our connector by its OffloadingConnector. Here both become children of vLLM's
MultiConnector, ours first (tier.py says what the two tell each other).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pullfill.engine.groups import BESIDE_TIER
from pullfill.errors import ConfigError


def take(args: Any, device_type: str) -> dict[str, Any] | None:
    """Take these flags out of vLLM's EngineArgs.

    Returns settings of vLLM's OffloadingConnector. None: KV is not offloaded. Raises ConfigError,
    one line that says what to do.

    device_type: of vLLM's platform."""
    if args.kv_transfer_config is not None:
        raise ConfigError(
            "--kv-transfer-config: pullfill adds its connector itself; leave it out. To keep more "
            "KV in CPU memory use --kv-offloading-size"
        )
    size, args.kv_offloading_size = args.kv_offloading_size, None
    if size is None:
        return None
    if size <= 0:
        raise ConfigError("KV offloading needs memory: give --kv-offloading-size a number above 0")
    if args.kv_offloading_backend != "native":
        raise ConfigError(
            "pullfill runs beside vLLM's OffloadingConnector only: leave out "
            "--kv-offloading-backend"
        )
    settings = {"cpu_bytes_to_use": size * (1 << 30)}
    if device_type == "cpu":
        settings |= {"spec_name": "HostSpec", "spec_module_path": "pullfill.engine.tier"}
    return settings


def beside(ours: Mapping[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return fields of vLLM's KVTransferConfig for both connectors.

    ours: the same for ours alone."""
    tier = {
        "kv_connector": "Tier",
        "kv_connector_module_path": "pullfill.engine.tier",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }
    ours = {**ours, "kv_connector_extra_config": {BESIDE_TIER: True}}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": ours["kv_role"],
        "kv_connector_extra_config": {"connectors": [ours, tier]},
    }


def check_config(config: Any) -> None:
    """config: vLLM's VllmConfig. Raises ConfigError, one line that says what to do."""
    if not config.cache_config.enable_prefix_caching:
        # Where vLLM cannot compute the rest of a prompt, it cannot after a load either.
        raise ConfigError(
            "KV offloading needs vLLM's prefix caching, which is off, by a flag or because vLLM "
            "has none for this model: leave out KV offloading"
        )
