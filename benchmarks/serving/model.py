"""The checkpoint that every system of the serving benchmark serves.

Made on this machine from a seed and kept beside the demo model: a Llama of 24 million parameters
with random weights, large enough that prefill and decode cost real time and small enough for two
cores. Only its speed is measured, so it is not trained; its answers still hang on the prompt.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import machine
from pullfill.demo.checkpoint import ensure_demo_model
from pullfill.demo.recipe import MARKUP_TOKENS, SPECIAL_TOKENS, Recipe
from pullfill.deploy import plan

NAME = "bench"
"""What requests call it."""

DTYPE = "bfloat16" if machine.multiplies_bfloat16() else "float32"
"""Of weights and KV in the engines; the file holds float32, cast when it is loaded."""

RECIPE = Recipe(
    hidden=512,
    layers=8,
    heads=8,
    kv_heads=4,
    head_dim=64,
    intermediate=1408,
    vocab=384,
    max_positions=8192,
    init_range=0.05,
    seed=24,
)


def model_directory() -> Path:
    """Where the checkpoint is; made on the first call (seconds). Raises OSError, ConfigError."""
    return ensure_demo_model(plan.demo_directory().parent / f"bench-{RECIPE.digest()}", RECIPE)


def kv_bytes_per_token(recipe: Recipe = RECIPE) -> int:
    """Bytes of keys and values that one token leaves in the cache, all layers, in `DTYPE`."""
    numbers = recipe.layers * 2 * recipe.kv_heads * recipe.head_dim
    return numbers * (2 if DTYPE == "bfloat16" else 4)


def plain_tokens(recipe: Recipe = RECIPE) -> range:
    """Token ids that are text: none of them ends an answer or opens a turn."""
    return range(len(SPECIAL_TOKENS), recipe.vocab - len(MARKUP_TOKENS))
