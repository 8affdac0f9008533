"""Finds what pullfill uses of vLLM, in pullfill's own source.

It sees what a file imports, which members of that the file reads and calls, and what a class of
ours overrides, reads and calls of a class of vLLM that it inherits from. It cannot see what is
reached through an object of type Any, as in `core.scheduler.running`. check.py and migration.py
list such names.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pullfill.engine import check, migration
from pullfill.engine.names.reached import REACHED
from pullfill.engine.names.signature import Call, Function, Signature
from pullfill.engine.names.tree import members

_VARIABLE = re.compile(r"VLLM_[A-Z0-9_]+")

Name = tuple[str, str]
"""A module, and a dotted path in it."""

STANDS_FOR: dict[Name, Name] = {
    ("pullfill.engine.front_client", "DecodeClient"): (
        "vllm.v1.engine.core_client",
        "AsyncMPClient",
    ),
}
"""Classes of ours that vLLM calls in place of its own, and does not only inherit from."""


@dataclass(frozen=True, slots=True)
class Use:
    """One place that uses a name of vLLM.

    where: file and line of pullfill.
    name: what it uses.
    call: what it gives, if it calls that.
    overrides: what our method of that name takes, if it is one.
    provides: what our class defines, if it inherits from that or stands for it.
    listed: the name is in a list of ours, which does not tell how it is used.
    sure: the installed vLLM must have the name. Otherwise it may be another release's, or ours."""

    where: str
    name: Name
    call: Call | None = None
    overrides: Signature | None = None
    provides: frozenset[str] | None = None
    listed: bool = False
    sure: bool = True


@dataclass(frozen=True, slots=True)
class _Class:
    where: str
    node: ast.ClassDef
    bases: list[Name]


def of_package(root: Path) -> list[Use]:
    """Return all uses in a package. root: its folder."""
    found: list[Use] = []
    classes: dict[Name, _Class] = {}
    reads: dict[str, str] = {}
    for file in files(root):
        inside = file.relative_to(root.parent)
        text = ast.parse(file.read_bytes())
        imported = imports(text)
        module = ".".join(inside.with_suffix("").parts)
        for node in ast.walk(text):
            found += _of_node(node, imported, str(inside), sure="release" not in inside.parts)
            if isinstance(node, ast.Attribute):
                reads.setdefault(node.attr, f"{inside}:{node.lineno}")
            elif isinstance(node, ast.ClassDef):
                bases = [
                    imported.get(ast.unparse(base), (module, ast.unparse(base)))
                    for base in node.bases
                ]
                classes[module, node.name] = _Class(f"{inside}:{node.lineno}", node, bases)
    inherited = {base for made in classes.values() for base in made.bases}
    for name, made in classes.items():
        ours, theirs = _ancestors(name, classes)
        defined = frozenset(name for kin in ours for name in members(kin.node))
        for base in theirs:
            found += _of_class(made, base, defined)
        stands_for = [STANDS_FOR[name]] if name in STANDS_FOR else []
        for base in [] if name in inherited else [*theirs, *stands_for]:
            found.append(Use(made.where, base, provides=defined))
    return [*found, *_listed(reads)]


def files(root: Path) -> Iterator[Path]:
    """Return the Python files of a package."""
    for folder, _, names in os.walk(root, followlinks=True):  # rooms are links in a checkout
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def _listed(reads: Mapping[str, str]) -> Iterator[Use]:
    """Return the names in our lists. reads: the first place where an attribute is read."""
    names = [
        (*kind.rpartition(".")[::2], name)
        for kind, text in REACHED.items()
        for name in text.split()
    ]
    for lists in (check.WORKER_NAMES, check.FRONTEND_NAMES, migration.REQUIRED_NAMES):
        for module, paths in lists.items():
            names += [(module, *path.replace(":", ".").rpartition(".")[::2]) for path in paths]
    for module, kind, name in names:
        where = reads.get(name, "pullfill/engine/check.py")
        yield Use(where, (module, f"{kind}.{name}".lstrip(".")), listed=True)


def imports(text: ast.Module) -> dict[str, Name]:
    """Return what the imported names of a file stand for, also those imported in functions."""
    found: dict[str, Name] = {}
    for node in ast.walk(text):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = node.module or "", alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                found[alias.asname or top] = alias.name if alias.asname else top, ""
    return found


def _of_node(node: ast.AST, imported: dict[str, Name], file: str, sure: bool) -> Iterator[Use]:
    where = f"{file}:{getattr(node, 'lineno', 0)}"
    if isinstance(node, ast.ImportFrom) and _vllms(node.module or ""):
        for alias in node.names:
            yield Use(where, (node.module or "", alias.name), sure=sure)
    elif isinstance(node, ast.Import):
        for alias in filter(lambda alias: _vllms(alias.name), node.names):
            yield Use(where, (alias.name, ""), sure=sure)
    elif isinstance(node, ast.Call) and (name := _named(node.func, imported)):
        yield Use(where, name, call=Call.of(node), sure=sure)
    elif isinstance(node, ast.Attribute) and (name := _named(node, imported)):
        yield Use(where, name, sure=sure)
    elif isinstance(node, ast.Constant) and _VARIABLE.fullmatch(str(node.value)):
        yield Use(where, ("vllm.envs", str(node.value)), sure=sure)


def _vllms(module: str) -> bool:
    return module.partition(".")[0] == "vllm"


def _named(node: ast.expr, imported: dict[str, Name]) -> Name | None:
    """Return the name of vLLM that an expression is, such as `FinishReason.ERROR`."""
    member = ""
    if isinstance(node, ast.Attribute):
        member = node.attr
        node = node.value
    module, path = imported.get(node.id, ("", "")) if isinstance(node, ast.Name) else ("", "")
    if not _vllms(module) or member.startswith("__"):
        return None
    return module, ".".join(filter(None, [path, member]))


def _of_class(made: _Class, base: Name, defined: frozenset[str]) -> Iterator[Use]:
    """Return what a class of ours uses of an ancestor in vLLM.

    defined: what it and its ancestors of ours define."""
    file = made.where.rpartition(":")[0]
    module, path = base
    for node in ast.walk(made.node):
        name, call, overrides = "", None, None
        if isinstance(node, Function) and node in made.node.body:
            static = "staticmethod" in map(ast.unparse, node.decorator_list)
            name, overrides = node.name, Signature.of(node, bound=not static)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("super()."):
            name, call = ast.unparse(node.func).removeprefix("super()."), Call.of(node)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            name = node.attr if node.attr not in defined else ""
        if name:
            at = f"{file}:{getattr(node, 'lineno', 0)}"
            yield Use(at, (module, f"{path}.{name}"), call, overrides, sure=False)


def _ancestors(name: Name, classes: dict[Name, _Class]) -> tuple[list[_Class], list[Name]]:
    """Return a class and its ancestors: those of ours, and the nearest of vLLM."""
    ours = [classes[name]] if name in classes else []
    theirs = [name] if _vllms(name[0]) else []
    for base in ours[0].bases if ours else ():
        more = _ancestors(base, classes)
        ours, theirs = ours + more[0], theirs + more[1]
    return ours, theirs
