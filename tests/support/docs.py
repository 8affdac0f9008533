"""The documents of this repository, and what they are compared with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click

from pullfill.deploy.cli import app

ROOT = Path(__file__).resolve().parents[2]
DOCS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
COMMANDS = ROOT / "docs" / "configuration.md"
NAMES = [str(path.relative_to(ROOT)) for path in DOCS]
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def code_of(name: str) -> list[str]:
    """Code blocks and code spans."""
    return CODE.findall(text_of(name))


def python_files() -> Iterator[Path]:
    for room in ("pullfill", "queue", "transfer", "decode_worker", "prefill_worker", "frontend"):
        # Not through the symlinks: each file once, at its real place.
        yield from (p for p in (ROOT / room).rglob("*.py") if p.resolve() == p)
    yield from (ROOT / "deploy").rglob("*.py")


@cache
def commands() -> dict[str, Any]:
    """`up`, `config get`, … → the click command."""
    found: dict[str, Any] = {}
    for name, command in app.commands.items():
        found[name] = command
        for sub, below in getattr(command, "commands", {}).items():
            found[f"{name} {sub}"] = below
    return found


def flags(command: Any) -> set[str]:
    params = command.get_params(click.Context(command))
    options = [p for p in params if p.param_type_name == "option" and not p.hidden]
    return {flag for o in options for flag in (*o.opts, *o.secondary_opts)} | {"--help"}
