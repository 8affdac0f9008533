"""A tiny model that answers with few tokens, and drafters for it: some drafts are accepted.

Which ones depends on the drafter's KV of the whole prompt."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from pullfill.demo.weights import EMBED, answer_only, layer_name, random_weights
from tests.support.checkpoint import TINY, tiny_checkpoint

FEW = (40, 90, 150)
_SEED = 11


def terse_model(directory: Path) -> Path:
    """Write the tiny checkpoint, changed to answer with FEW only. Returns `directory`."""
    shutil.copytree(tiny_checkpoint(), directory)
    weights = load_file(directory / "model.safetensors")
    answer_only(weights, FEW)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def small_model(directory: Path, model: Path) -> Path:
    """Write a draft model for `terse_model`: the same with its first layer only."""
    shutil.copytree(model, directory)
    _set_layers(directory)
    weights = load_file(directory / "model.safetensors")
    kept = {n: w for n, w in weights.items() if ".layers." not in n or ".layers.0." in n}
    save_file(kept, directory / "model.safetensors", {"format": "pt"})
    return directory


def eagle_head(directory: Path, model: Path) -> Path:
    """Write an EAGLE head for `terse_model`: one layer on top of embeddings and hidden states."""
    directory.mkdir()
    shutil.copy(model / "config.json", directory)
    _set_layers(directory)
    weights = random_weights(replace(TINY, layers=1, seed=_SEED))
    answer_only(weights, FEW)
    head = {
        name.removeprefix("model."): weight
        for name, weight in weights.items()
        if ".layers." in name and name != layer_name(0, "input_layernorm")
    }
    draw = torch.Generator().manual_seed(_SEED)
    mix = torch.randn(TINY.hidden, 2 * TINY.hidden, generator=draw) * TINY.init_range
    mix[0] = 0
    mix[0, 0] = 1  # the number with which `answer_only` marks an embedding
    assert weights[EMBED][0, 0] > 0
    save_file(head | {"fc.weight": mix}, directory / "model.safetensors", {"format": "pt"})
    return directory


def _set_layers(directory: Path, layers: int = 1) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
