"""The user's flags for vLLM's own KV offloading, which adds a second KV cache to a worker.

vLLM would replace our connector by its OffloadingConnector. Here both become children of vLLM's
MultiConnector, ours first (tier.py says what the two tell each other).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pullfill import releases
from pullfill.engine import check, release
from pullfill.engine.groups import BESIDE_TIER
from pullfill.errors import ConfigError


def take(args: Any, device_type: str) -> dict[str, Any] | None:
    """Take these flags out of vLLM's EngineArgs.

    Returns settings of vLLM's OffloadingConnector. None: KV is not offloaded. Raises ConfigError,
    one line that says what to do.

    device_type: of vLLM's platform."""
    size = args.kv_offloading_size
    if size is None:
        return None
    if args.kv_offloading_backend != "native":
        raise ConfigError(
            f"--kv-offloading-backend {args.kv_offloading_backend}: pullfill runs beside vLLM's "
            "native KV offloading only: leave it out"
        )
    if size <= 0:
        raise ConfigError(f"--kv-offloading-size {size}: give a number of GiB above 0")
    if not release.this.offloads_kv:
        raise ConfigError(
            f"--kv-offloading-size is not tested with vLLM {check.require_version()}: leave it "
            f"out, or install vLLM {releases.VLLM}"
        )
    args.kv_offloading_size = None
    settings: dict[str, Any] = {"cpu_bytes_to_use": size * (1 << 30)}
    if device_type == "cpu":
        settings |= {"spec_name": "HostSpec", "spec_module_path": "pullfill.engine.host_tier"}
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
    ours = {
        **ours,
        "kv_connector_extra_config": {**ours["kv_connector_extra_config"], BESIDE_TIER: True},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": ours["kv_role"],
        "kv_connector_extra_config": {"connectors": [ours, tier]},
    }


def check_model(config: Any) -> None:
    """Raise ConfigError if vLLM cannot use offloaded KV of this model. config: its VllmConfig."""
    # Where vLLM cannot compute the rest of a prompt after a hit, it cannot after a load either.
    if not config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "--kv-offloading-size needs vLLM's prefix caching, which is off, by a flag or because "
            "vLLM has none for this model: leave it out"
        )


def size_of(config: Any) -> int:
    """Return the bytes of memory that vLLM offloads KV to. config: its VllmConfig."""
    extra = config.kv_transfer_config.kv_connector_extra_config
    tiers = [c for c in extra.get("connectors", ()) if c["kv_connector"] == "Tier"]
    return sum(int(c["kv_connector_extra_config"]["cpu_bytes_to_use"]) for c in tiers)
