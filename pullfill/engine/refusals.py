"""What a worker's engine must not be: refused in one line, before vLLM loads a model.

vLLM refuses some of this as well, later and with advice that does not help here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pullfill.errors import ConfigError

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def check_flags(args: Any, device_type: str, env: Mapping[str, str]) -> None:
    """args: vLLM's EngineArgs. device_type: of vLLM's platform, "" if it found no device.

    Raises ConfigError, one line that says what to do.
    """
    if not device_type:
        raise ConfigError(
            "vLLM's CUDA build is installed, but finds no NVIDIA driver with a GPU: make "
            "`nvidia-smi` work, or install the CPU build with PULLFILL_DEVICE=cpu make install"
        )
    for name in ("enable_sleep_mode", "enable_cumem_allocator"):
        if getattr(args, name):
            # Sleeping unmaps KV memory under the copies of other workers. CUDA IPC cannot export
            # memory of that allocator.
            raise ConfigError(
                f"--{name.replace('_', '-')}: its memory cannot be shared with other workers; "
                "remove the flag"
            )
    if device_type != "cuda":
        return
    for name in _ALLOCATOR:
        if "expandable_segments:true" in env.get(name, "").replace(" ", "").lower():
            raise ConfigError(
                f"{name} has expandable_segments:True: such memory cannot be shared with other "
                "workers; remove it"
            )


def check_config(config: Any) -> None:
    """config: vLLM's VllmConfig. Raises ConfigError, one line that says what to do."""
    kept = str(config.cache_config.cache_dtype)
    if kept.endswith("per_token_head"):
        # `_ensure_scale_caches` in vLLM's triton_attn.py.
        raise ConfigError(
            f"--kv-cache-dtype {kept}: vLLM sets the scales of all blocks to 1 when it first "
            "computes attention, also of KV that another worker has written; use fp8"
        )
