"""What two workers must share to exchange KV bytes, and what they may differ in.

`describe` makes the compatibility record: workers whose records differ exchange nothing. KV of one
record can still differ by rounding, or by a fault of one way to compute it. So the self-check
compares two kinds of workers once. `rounding_digest` says which kind a worker is.
"""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pullfill import __version__
from pullfill.engine.kv import kind_without_model
from pullfill.wire import Compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from pullfill.engine.kv import Geometry

_SAMPLE = 1 << 16
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_NOT_THE_MODEL = ("_name_or_path", "transformers_version")


def model_fingerprint(model: str, revision: str | None = None) -> str:
    """16 hex digits that differ when the weights or the architecture differ.

    For a directory: config.json plus, for each weight file, its size, its first 64 KiB (the
    safetensors header and first tensors) and 64 KiB from the middle and the end. Reading whole
    checkpoints would cost minutes. For a hub name: the name and revision.
    """
    digest = hashlib.blake2b(digest_size=8)
    root = Path(model)
    if not root.is_dir():
        digest.update(f"{model}@{revision}".encode())
        return digest.hexdigest()
    config = root / "config.json"
    if config.exists():
        # Key order and where it was saved from do not matter.
        text = json.loads(config.read_text())
        text.pop("_name_or_path", None)
        digest.update(json.dumps(text, sort_keys=True).encode())
    weights = (p for pattern in _WEIGHTS for p in root.glob(pattern))
    for path in sorted(weights):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for offset in (0, size // 2, max(0, size - _SAMPLE)):
                file.seek(offset)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def describe(config: VllmConfig, fingerprint: str, geometry: Geometry) -> Compat:
    """Return the compatibility record of this engine.

    fingerprint: from `fingerprint_as_run`.
    geometry: as its ranks told it."""
    import vllm
    from vllm.platforms import current_platform

    model = config.model_config
    computes = kind_without_model(config)  # such KV means nothing to a model
    if not computes:
        computes = _isa() if current_platform.is_cpu() else current_platform.device_type
    return Compat(
        model=model.served_model_name,
        model_fingerprint=fingerprint,
        vllm=vllm.__version__,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_cache_dtype=str(config.cache_config.cache_dtype),
        block_size=int(config.cache_config.block_size),
        layout="LBHNC",
        num_layers=geometry.num_layers,
        num_kv_heads=model.get_total_num_kv_heads(),
        page_bytes=geometry.page_bytes,
        isa=computes,
        attention=geometry.backend,
        kv_scales=geometry.scales,
        kv_groups=geometry.groups.kinds,
    )


def fingerprint_as_run(config: VllmConfig) -> str:
    """Return a fingerprint of the model's files and of the flags that change its KV.

    Such flags are `--hf-overrides` and `--quantization`. Take it before the engine is built."""
    # vLLM's code of some models changes the model's config while it loads. With one rank this is
    # our config. With several ranks it is that of other processes, and ours stays as it was.
    model: Any = config.model_config
    resolved = getattr(model.hf_config, "_commit_hash", None) or model.revision
    fields = {k: v for k, v in model.hf_text_config.to_dict().items() if k not in _NOT_THE_MODEL}
    digest = hashlib.blake2b(digest_size=8)
    digest.update(model_fingerprint(model.model, resolved).encode())
    digest.update(json.dumps(fields, sort_keys=True, default=str).encode())
    digest.update(str(model.quantization).encode())
    return digest.hexdigest()


def _isa() -> str:
    """Return the processor's architecture and its best vector extension.

    CPU attention may reorder K by them. So only equal processors exchange KV bytes."""
    flags: set[str] = set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags = set(line.split(":", 1)[1].split())
                break
    except OSError:
        pass
    best = next((f for f in ("amx_tile", "avx512f", "avx2", "asimd") if f in flags), "plain")
    return f"{platform.machine()}-{best}"


def rounding_digest(config: Any) -> str:
    """Return a digest of what decides how an engine rounds, or "" if there is no model."""
    import torch
    from vllm.platforms import current_platform

    if kind_without_model(config):
        return ""
    parallel, steps = config.parallel_config, config.scheduler_config
    compiled = config.compilation_config
    told = {
        "pullfill": __version__,
        "torch": torch.__version__,
        "device": current_platform.get_device_name(),
        "role": config.kv_transfer_config.kv_role,
        "ranks": (parallel.tensor_parallel_size, parallel.pipeline_parallel_size),
        "expert_parallel": parallel.enable_expert_parallel,
        "steps": (
            steps.max_num_batched_tokens,
            steps.enable_chunked_prefill,
            steps.long_prefill_token_threshold,
        ),
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "block_size": config.cache_config.block_size,
        "attention": getattr(config.attention_config, "backend", None),
        "compiled": (compiled.mode, compiled.backend, sorted(compiled.custom_ops)),
        "speculation": config.speculative_config is not None,
    }
    text = json.dumps(told, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def dtype_of_kv(config: VllmConfig) -> str:
    """vLLM's name of the numbers in the KV cache."""
    kept = str(config.cache_config.cache_dtype)
    return str(config.model_config.dtype).removeprefix("torch.") if kept == "auto" else kept
