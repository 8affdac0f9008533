"""A random-weight checkpoint for tests that run real engines: small, float32, made in a second.

Its answers depend on every part of the prompt, so one wrong KV block shows in the tokens or at
least in the logprobs.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pullfill.engine.demo import ensure_demo_model
from pullfill.engine.demo_recipe import Recipe

TINY = Recipe(
    hidden=128,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=32,
    intermediate=256,
    vocab=384,
    init_range=0.2,
    seed=7,
)


def tiny_checkpoint(cache_dir: Path | None = None, recipe: Recipe = TINY) -> Path:
    """Directory of the checkpoint, made unless a test run of this user made it before.

    cache_dir: where checkpoints are kept, one folder per recipe (default: a folder of this user
    under the temporary directory). Safe to call from several processes at once.
    """
    if cache_dir is None:
        cache_dir = Path(tempfile.gettempdir()) / f"pullfill-tests-{os.getuid()}"
        cache_dir.mkdir(mode=0o700, exist_ok=True)
    return ensure_demo_model(cache_dir / f"tiny-{recipe.digest()}", recipe)
