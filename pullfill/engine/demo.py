"""The demo model: a small Llama checkpoint made on this machine, on first use.

`ensure_demo_model(DIR)` owns DIR: it builds beside it and renames, so DIR is either complete or
absent, also after a crash; callers of any process wait for one another on a lock file.

    python -m pullfill.engine.demo ensure DIR
"""

from __future__ import annotations

import argparse
import fcntl
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pullfill.engine.demo_recipe import DEMO, Recipe
from pullfill.errors import ConfigError

Progress = Callable[[float, str], None]
"""Called with the fraction done in [0, 1] and what is going on."""

MARKER = "demo-recipe"


def is_ready(directory: Path, recipe: Recipe = DEMO) -> bool:
    """Whether directory holds the model of exactly this recipe. Cheap."""
    return _made_by(directory) == recipe.digest()


def ensure_demo_model(
    directory: Path, recipe: Recipe = DEMO, progress: Progress | None = None
) -> Path:
    """Make the checkpoint unless it is there; returns directory, made absolute.

    Takes about a minute of one core the first time (training) and nothing later. An older recipe's
    model is replaced; processes that have it open keep it. Raises ConfigError when directory
    holds something else, OSError when it cannot be written.
    """
    directory = directory.absolute()
    if is_ready(directory, recipe):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.parent / f".{directory.name}.lock"):
        if is_ready(directory, recipe):
            return directory
        if _made_by(directory) is None and directory.exists() and _occupied(directory):
            raise ConfigError(
                f"{directory} is not empty and not a demo model: name another directory"
            )
        _sweep(directory)
        fresh = Path(tempfile.mkdtemp(prefix=f".{directory.name}.new-", dir=directory.parent))
        try:
            _build(recipe, fresh, progress or (lambda done, what: None))
            _swap(fresh, directory)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return directory


def _made_by(directory: Path) -> str | None:
    try:
        return (directory / MARKER).read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _occupied(directory: Path) -> bool:
    return not directory.is_dir() or any(directory.iterdir())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The file stays: removing it would let a third caller lock a new one beside a waiter's.
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _sweep(directory: Path) -> None:
    """Remove what a killed builder left. Only under the lock, so nobody is building."""
    for leftover in directory.parent.glob(f".{directory.name}.new-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for leftover in directory.parent.glob(f".{directory.name}.old-*"):
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


def _build(recipe: Recipe, directory: Path, progress: Progress) -> None:
    # Imported here: whoever finds the model ready need not wait for torch.
    if recipe.train_steps:
        from pullfill.engine.demo_train import train

        train(recipe, directory, progress)
    else:
        from pullfill.engine.demo_llama import Llama, random_weights
        from pullfill.engine.demo_tokenizer import build_tokenizer, write_tokenizer

        write_tokenizer(build_tokenizer(recipe.vocab), recipe, directory)
        Llama(recipe, random_weights(recipe)).save(directory)
    for name, content in (
        ("config.json", recipe.hf_config()),
        ("generation_config.json", recipe.generation_config()),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    (directory / MARKER).write_text(recipe.digest() + "\n")


def _bar(done: float, what: str) -> None:
    if sys.stderr.isatty():
        filled = round(done * 30)
        bar = "#" * filled + "." * (30 - filled)
        sys.stderr.write(f"\rdemo model [{bar}] {what:<60.60}" + ("\n" if done >= 1 else ""))
        sys.stderr.flush()


def main(argv: list[str] | None = None) -> int:
    """Command line. Prints the directory on stdout; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pullfill.engine.demo", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    ensure = commands.add_parser("ensure", help="make the demo model unless it is there")
    ensure.add_argument("directory", type=Path)
    directory: Path = parser.parse_args(argv).directory
    if not is_ready(directory):
        print(f"making the demo model in {directory} (once, about a minute)", file=sys.stderr)
    try:
        print(ensure_demo_model(directory, progress=_bar))
    except (ConfigError, OSError) as exc:
        print(f"cannot make the demo model: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
