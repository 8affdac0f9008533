"""How the demo checkpoint comes to lie in its directory."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pullfill.demo import checkpoint as demo
from pullfill.demo.recipe import Recipe
from tests.support.late import Late

files: Any = Late("safetensors.torch")

SMALL = Recipe(
    hidden=32, layers=1, heads=2, kv_heads=1, intermediate=32, vocab=268, max_positions=128
)


def test_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(OSError, match="not empty"):
        demo.ensure_demo_model(tmp_path, SMALL)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    assert not list(tmp_path.parent.glob("*.new"))


def _race(where: Path, log: Path, gate: object) -> None:
    save = files.save_file

    def counted(*args: object) -> None:
        with log.open("a") as handle:
            handle.write(f"{os.getpid()}\n")
        save(*args)

    mock.patch("safetensors.torch.save_file", counted).start()
    gate.wait()  # type: ignore[attr-defined]
    demo.ensure_demo_model(where, SMALL)
    files.load_file(where / "model.safetensors")  # complete as soon as ensure returns


def test_concurrent_callers_build_once(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("fork")
    gate, log = spawn.Barrier(4), tmp_path / "builds"
    children = [spawn.Process(target=_race, args=(tmp_path / "m", log, gate)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0] * 4
    assert len(log.read_text().split()) == 1
