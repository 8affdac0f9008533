"""Small random LoRA adapters of small random checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

RANK = 8
TARGETS = ("q_proj", "v_proj", "o_proj")


def lora_adapter(directory: Path, model: Path, seed: int, rank: int = RANK) -> Path:
    """Write an adapter of a checkpoint's attention. Its answers differ from the checkpoint's.

    Returns `directory`."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    with safe_open(model / "model.safetensors", "pt") as weights:
        for key in weights.keys():
            name = key.removesuffix(".weight")
            if not name.endswith(tuple(f"self_attn.{target}" for target in TARGETS)):
                continue
            out, into = weights.get_slice(key).get_shape()
            for part, shape in (("A", (rank, into)), ("B", (out, rank))):
                random = 0.1 * torch.randn(*shape, generator=generator)
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = random
    save_file(tensors, str(directory / "adapter_model.safetensors"))
    targets = sorted({key.split(".")[-3] for key in tensors})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank,
        "target_modules": targets, "bias": "none", "lora_dropout": 0.0,
        "base_model_name_or_path": model.name,
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
