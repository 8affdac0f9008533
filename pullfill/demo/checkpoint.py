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
import tempfile
from pathlib import Path

from pullfill.demo.recipe import DEMO, Recipe
from pullfill.errors import ConfigError

MARKER = "demo-recipe"


def is_ready(directory: Path, recipe: Recipe = DEMO) -> bool:
    """Return whether directory holds the model of this recipe."""
    return _made_by(directory) == recipe.digest()


def ensure_demo_model(directory: Path, recipe: Recipe = DEMO) -> Path:
    """Make the checkpoint unless it is there. Return the absolute path of the directory.

    The model of another recipe is replaced. Processes that have its files open keep them.

    Raises ConfigError if the directory holds something else, OSError if it cannot be written.
    """
    directory = directory.absolute()
    if is_ready(directory, recipe):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    # The file stays. Without it a third process would lock a new file, not the one of a waiter.
    with (directory.parent / f".{directory.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_ready(directory, recipe):
            return directory
        if _made_by(directory) is None and _occupied(directory):
            raise ConfigError(
                f"{directory} is not empty and not a demo model: name another directory"
            )
        _sweep(directory)
        fresh = Path(tempfile.mkdtemp(prefix=f".{directory.name}.new-", dir=directory.parent))
        try:
            _build(recipe, fresh)
            _swap(fresh, directory)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return directory


def _made_by(directory: Path) -> str | None:
    try:
        return (directory / MARKER).read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _occupied(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()


def _sweep(directory: Path) -> None:
    """Remove what a killed process left. The caller holds the lock, so nobody is at work."""
    for what in ("new", "old"):
        for leftover in directory.parent.glob(f".{directory.name}.{what}-*"):
            shutil.rmtree(leftover, ignore_errors=True)


def _swap(fresh: Path, directory: Path) -> None:
    fresh.chmod(0o755)
    if directory.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{directory.name}.old-", dir=directory.parent))
        directory.rename(old / "model")
        fresh.rename(directory)
        shutil.rmtree(old, ignore_errors=True)
    else:
        fresh.rename(directory)


def _build(recipe: Recipe, directory: Path) -> None:
    # Imported here: a process that finds the model there need not wait for torch.
    from safetensors.torch import save_file

    from pullfill.demo.recipe import answer_only, random_weights
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
    (directory / MARKER).write_text(recipe.digest() + "\n")


def main(directory: str) -> int:
    """Make the demo model unless it is there. Return the exit code."""
    try:
        print(ensure_demo_model(Path(directory)))
    except (ConfigError, OSError) as exc:
        print(f"cannot make the demo model: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
