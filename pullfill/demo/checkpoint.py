"""Makes the demo model: a small Llama checkpoint with random weights. As a program:

    python -m pullfill.demo.checkpoint DIR

It is made beside DIR and renamed to DIR at the end. So DIR is whole or absent, also after a crash.
Processes that make the same one wait for one another at a lock file.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import sys
from pathlib import Path

from pullfill.demo.recipe import DEMO, Recipe, answer_only, random_weights


def ensure_demo_model(directory: Path, recipe: Recipe = DEMO) -> Path:
    """Make the checkpoint unless there is one. Return the absolute path of the directory.

    Its name should have `recipe.digest()`: a checkpoint that is there is not compared.

    Raises OSError if the directory holds something else, or cannot be written."""
    directory = directory.absolute()
    if _is_there(directory):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    # The file stays. Without it a third process would lock a new file, not the one of a waiter.
    with (directory.parent / f".{directory.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_there(directory):
            return directory
        fresh = directory.with_name(f".{directory.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)  # of a process that was killed
        fresh.mkdir()
        try:
            _build(recipe, fresh)
            fresh.rename(directory)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return directory


def _is_there(directory: Path) -> bool:
    return (directory / "config.json").is_file()


def _build(recipe: Recipe, directory: Path) -> None:
    # Imported here: a process that finds the model there need not wait for torch.
    from safetensors.torch import save_file

    from pullfill.demo.tokenizer import build_tokenizer, readable, write_tokenizer

    tokenizer, weights = build_tokenizer(recipe.vocab), random_weights(recipe)
    if recipe.readable:
        answer_only(weights, readable(tokenizer))
    write_tokenizer(tokenizer, recipe, directory)
    file = directory / "model.safetensors"
    save_file(weights, file, {"format": "pt"})
    file.chmod(0o644)
    for name, content in (
        ("config.json", recipe.hf_config()),
        ("generation_config.json", recipe.generation_config()),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")


def main(directory: str) -> int:
    """Make the demo model unless it is there. Return the exit code."""
    try:
        ensure_demo_model(Path(directory))
    except OSError as exc:
        print(f"cannot make the demo model: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
