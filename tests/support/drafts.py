"""A tiny model that answers with few tokens, and drafters for it: some drafts are accepted."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from pullfill.demo.recipe import answer_only, layer_name, random_weights
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
    head["fc.weight"] = _mix(TINY.hidden)
    save_file(head, directory / "model.safetensors", {"format": "pt"})
    return directory


def _mix(hidden: int) -> torch.Tensor:
    """Return a matrix that joins the embedding of a token and a hidden state."""
    draw = torch.Generator().manual_seed(_SEED)
    mix = torch.randn(hidden, 2 * hidden, generator=draw) * TINY.init_range
    mix[0] = 0
    mix[0, 0] = 1  # the number with which `answer_only` marks an embedding
    return mix


def _set_layers(directory: Path, layers: int = 1) -> None:
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_hidden_layers": layers}
    (directory / "config.json").write_text(json.dumps(config))
