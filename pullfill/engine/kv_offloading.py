"""The user's flags for vLLM's own KV offloading, which adds a second KV cache to a worker.

vLLM would replace our connector by its OffloadingConnector. Here both become children of vLLM's
MultiConnector, ours first (tier.py says what the two tell each other).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pullfill import releases
from pullfill.engine import check, compat, release
from pullfill.engine.groups import BESIDE_TIER
from pullfill.errors import ConfigError

_CONNECTOR = "OffloadingConnector"
_MEMORY = "CPUOffloadingSpec"
# Names of vLLM's classes, and of ours in tier.py that replace them without a GPU.
_HOST = {_MEMORY: "HostSpec", "TieringOffloadingSpec": "HostTieringSpec"}


def take(args: Any, device_type: str) -> dict[str, Any] | None:
    """Take these flags out of vLLM's EngineArgs.

    Returns settings of vLLM's OffloadingConnector. None: KV is not offloaded. Raises ConfigError,
    one line that says what to do.

    device_type: of vLLM's platform."""
    given, size = args.kv_transfer_config, args.kv_offloading_size
    if given is None and size is None:
        return None
    if given is not None and (given.kv_connector != _CONNECTOR or size is not None):
        raise ConfigError(
            f"--kv-transfer-config: it may name vLLM's {_CONNECTOR} only, and then not beside "
            "--kv-offloading-size; pullfill adds its own connector itself"
        )
    if args.kv_offloading_backend != "native":
        raise ConfigError(
            f"pullfill runs beside vLLM's {_CONNECTOR} only: leave out --kv-offloading-backend"
        )
    if not release.this.offloads_kv:
        raise ConfigError(
            f"KV offloading is not tested with vLLM {check.require_version()}: leave it out, or "
            f"install vLLM {releases.VLLM}"
        )
    args.kv_offloading_size = None
    settings = dict(given.kv_connector_extra_config) if given is not None else {}
    if size is not None:
        settings["cpu_bytes_to_use"] = size * (1 << 30)
    _check(settings, device_type, args.enable_lora)
    if device_type == "cpu":
        settings["spec_name"] = _HOST[settings.get("spec_name", _MEMORY)]
        settings["spec_module_path"] = "pullfill.engine.tier"
    return settings


def _check(settings: Mapping[str, Any], device_type: str, lora: bool) -> None:
    where = f"kv_connector_extra_config of the {_CONNECTOR}"
    if settings.get("spec_name", _MEMORY) not in _HOST or "spec_module_path" in settings:
        raise ConfigError(f"{where}: spec_name may be one of {', '.join(_HOST)}")
    size = settings.get("cpu_bytes_to_use")
    if not isinstance(size, int | float) or size <= 0:
        raise ConfigError("KV offloading needs memory: give --kv-offloading-size a number above 0")
    tiers = settings.get("secondary_tiers", [])
    if not isinstance(tiers, list) or any(
        not isinstance(tier, dict) or tier.get("type") != "fs" or "root_dir" not in tier
        for tier in tiers
    ):
        # Others exchange KV with workers whose weights nobody compares.
        raise ConfigError(f"{where}: secondary_tiers may be of type fs only, with a root_dir")
    if tiers and check.base_version(check.require_version()) != releases.VLLM:
        raise ConfigError(f"{where}: secondary_tiers are tested with vLLM {releases.VLLM} only")
    if tiers and lora:
        # vLLM finds a file by the place of our copy of the adapter, too. Only this process has it.
        raise ConfigError(f"{where}: secondary_tiers cannot be used with --enable-lora")
    if settings.keys() & {"block_size", "blocks_per_chunk"}:
        # Of a remote prefill, vLLM keeps the end of a window. A chunk would have a part of it only.
        raise ConfigError(f"{where}: leave out block_size and blocks_per_chunk")
    if device_type == "cpu" and settings.get("canonical_layout"):
        raise ConfigError(f"{where}: canonical_layout needs a GPU")


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


def complete(config: Any) -> None:
    """Check the settings against the model, and keep its files apart from those of others.

    Raises ConfigError, one line that says what to do.

    config: vLLM's VllmConfig."""
    children = config.kv_transfer_config.kv_connector_extra_config.get("connectors", ())
    for child in children[1:]:
        if not config.cache_config.enable_prefix_caching:
            # Where vLLM cannot compute the rest of a prompt, it cannot after a load either.
            raise ConfigError(
                "KV offloading needs vLLM's prefix caching, which is off, by a flag or because "
                "vLLM has none for this model: leave out KV offloading"
            )
        tiers = child["kv_connector_extra_config"].get("secondary_tiers", ())
        if tiers and config.parallel_config.world_size > 1:
            # vLLM takes files of other numbers of ranks for its own, and they have another order.
            raise ConfigError(
                "KV offloading to a disk works with one rank only: leave out secondary_tiers"
            )
        for tier in tiers:
            # vLLM finds files by the model's path. Other weights at this path would find them too.
            tier["root_dir"] = f"{tier['root_dir']}/{compat.stored_kv(config)}"


def size_of(config: Any) -> int:
    """Return the bytes of memory that vLLM offloads KV to. config: its VllmConfig."""
    extra = config.kv_transfer_config.kv_connector_extra_config
    tiers = [c for c in extra.get("connectors", ()) if c["kv_connector"] == "Tier"]
    return sum(int(c["kv_connector_extra_config"]["cpu_bytes_to_use"]) for c in tiers)
