"""A tiny model that answers with few tokens, and a drafter for it: some drafts are accepted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from pullfill.demo.recipe import answer_only
from tests.support.checkpoint import tiny_checkpoint

FEW = (40, 90, 150)
NGRAM = {
    "method": "ngram", "num_speculative_tokens": 3,
    "prompt_lookup_max": 4, "prompt_lookup_min": 1,
}  # fmt: skip
SPECULATE = f"--speculative-config={json.dumps(NGRAM)}"


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
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    weights = load_file(directory / "model.safetensors")
    kept = {n: w for n, w in weights.items() if ".layers." not in n or ".layers.0." in n}
    save_file(kept, directory / "model.safetensors", {"format": "pt"})
    return directory
