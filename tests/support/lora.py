"""Small random LoRA adapters of the tiny checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.checkpoint import TINY

RANK = 8


def lora_adapter(directory: Path, seed: int, rank: int = RANK) -> Path:
    """Write an adapter whose answers differ from those of the base model. Returns `directory`."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    sizes = {"q_proj": TINY.heads * TINY.head_dim, "v_proj": TINY.kv_heads * TINY.head_dim}
    tensors = {}
    for layer in range(TINY.layers):
        for name, out in sizes.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, TINY.hidden, generator=generator)
            tensors[f"{key}.lora_B.weight"] = torch.randn(out, rank, generator=generator)
    save_file(
        {k: 0.1 * v for k, v in tensors.items()}, str(directory / "adapter_model.safetensors")
    )
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank,
        "target_modules": list(sizes), "bias": "none", "lora_dropout": 0.0,
        "base_model_name_or_path": "tiny",
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
