"""Prose to train the demo model on: the documentation that comes with every Python.

Docstrings of the standard library, read from its source without importing it, and the language
reference behind `help()`. Read at training time on the machine that trains; nothing is shipped.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SKIPPED = {  # other people's packages, tests, and folders with more code than prose
    *("site-packages", "dist-packages", "lib-dynload", "test", "tests", "idlelib", "lib2to3"),
    *("turtledemo", "encodings", "pydoc_data", "tkinter", "distutils", "ensurepip", "msilib"),
}
_UNWANTED = re.compile(r">>>|::|\.\.\.|[|\\{}^~=+]{2}|https?:|^[-*#>|]", re.MULTILINE)
_NOT_PROSE = re.compile(r"[^A-Za-z ,.;'\"()-]")


@dataclass(frozen=True, slots=True)
class Entry:
    """What one documented thing says about itself. `name` is dotted, e.g. `json.dumps`."""

    name: str
    paragraphs: tuple[str, ...]


def read_corpus() -> list[Entry]:
    """All entries with some prose, in a fixed order for a given Python. Takes a few seconds."""
    root = Path(sysconfig.get_path("stdlib"))
    entries = list(_reference())
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if not _SKIPPED.intersection(parts):
            module = ".".join(p for p in parts if p != "__init__")
            entries.extend(_docstrings(path, module))
    return entries


def _reference() -> Iterator[Entry]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions split it off
        return
    for name, text in sorted(topics.items()):
        if paragraphs := prose(text):
            yield Entry(name, paragraphs)


def _docstrings(path: Path, module: str) -> Iterator[Entry]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return
    stack: list[tuple[str, ast.AST]] = [(module, tree)]
    while stack:
        name, node = stack.pop()
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if paragraphs := prose(ast.get_docstring(node, clean=True) or ""):
            yield Entry(name, paragraphs)
        for child in reversed(node.body):
            stack.append((f"{name}.{getattr(child, 'name', '')}", child))


def prose(text: str) -> tuple[str, ...]:
    """The paragraphs of text that read as English, each unwrapped to one line."""
    kept = []
    for block in re.split(r"\n\s*\n", text):
        if _UNWANTED.search(textwrap.dedent(block)):
            continue
        line = " ".join(block.split())
        if (
            len(line) >= 40
            and line[0].isupper()
            and line[-1] in ".:!?"
            and len(_NOT_PROSE.findall(line)) <= len(line) // 16
        ):
            kept.append(line.replace("’", "'").replace("“", '"').replace("”", '"'))
    return tuple(kept)
