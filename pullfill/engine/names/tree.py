"""Finds names in a tree of Python files. Imports none of them.

It follows re-exports inside the tree, bases of classes, branches (`if`, `try`, `with`) and
attributes that methods set on `self`. What the tree imports from another package counts as found,
with whatever members.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pullfill.engine.names.signature import Function, Signature
from pullfill.errors import ConfigError

_MAKES_FIELDS = re.compile(r"\b(dataclass|config|Struct|BaseModel|NamedTuple)\b")
_DEFAULTS = {"default", "default_factory"}


@dataclass(frozen=True, slots=True)
class Import:
    """What a name stands for that a module imports. name: empty for the module itself."""

    module: str
    name: str


Definition = ast.AST | Import


@dataclass(frozen=True, slots=True)
class Found:
    """What a name stands for.

    module: the module that it is in.
    node: its definition there. None: the module itself. ast.Pass: it is in another package."""

    module: str
    node: ast.AST | None = None


class Tree:
    """The Python files of one package. Methods raise ConfigError if they cannot parse one.

    root: the directory that the package's folder is in.
    package: its name."""

    def __init__(self, root: Path, package: str = "vllm") -> None:
        self._root = root
        self._package = package
        self._modules: dict[str, dict[str, Definition] | None] = {}
        self._following: set[Import] = set()

    def names_of(self, module: str) -> dict[str, Definition] | None:
        """Return what a module defines and imports. None: there is no such module."""
        if module not in self._modules:
            self._modules[module] = self._read(module)
        return self._modules[module]

    def _read(self, module: str) -> dict[str, Definition] | None:
        path = self._root.joinpath(*module.split("."))
        parent = module.rpartition(".")[0]
        for file, package in ((path / "__init__.py", module), (path.with_suffix(".py"), parent)):
            if file.is_file():
                try:
                    return definitions(ast.parse(file.read_bytes()).body, package)
                except (SyntaxError, ValueError) as exc:
                    raise ConfigError(f"{file} is no source for this Python: {exc}") from exc
        return {} if path.is_dir() else None

    def defining(self, name: str) -> list[str]:
        """Return the modules that define a class, a function or a variable of this name."""
        begins = re.compile(rf"^((async )?def |class )?{name}\b *[:=(]", re.M)
        files = sorted((self._root / self._package).rglob("*.py"))
        texts = ((file, file.read_text(errors="replace")) for file in files)
        found = (file for file, text in texts if name in text and begins.search(text))
        parts = (file.relative_to(self._root).with_suffix("").parts for file in found)
        return [".".join(p[:-1] if p[-1] == "__init__" else p) for p in parts]

    # ------------------------------------------------------------------ names

    def find(self, module: str, path: str = "") -> Found | None:
        """Return what a dotted path stands for in a module, e.g. `Class.method`."""
        found = None if self.names_of(module) is None else Found(module)
        for name in filter(None, path.split(".")):
            if found is None:
                return None
            found = self._member(found, name)
        return found

    def _member(self, found: Found, name: str) -> Found | None:
        node = found.node
        if node is None:
            return self._in_module(found.module, name)
        if isinstance(node, ast.ClassDef):
            inside = ((kin, members(kin.node).get(name)) for kin in self.line(found))
            return next((Found(kin.module, n) for kin, n in inside if n is not None), None)
        if isinstance(node, ast.AnnAssign):  # an object: its class has the member
            kind = self._class_named(found.module, node.annotation)
            return None if kind is None else self._member(kind, name)
        return found if isinstance(node, ast.Pass) else None

    def _in_module(self, module: str, name: str) -> Found | None:
        names = self.names_of(module) or {}
        node = names.get(name)
        if isinstance(node, ast.AST):
            return Found(module, node)
        if node is not None and not self._has(node.module):
            return Found(node.module, ast.Pass())
        everything = (n for n in names.values() if isinstance(n, Import) and n.name == "*")
        sources = [node] if node else [Import(n.module, name) for n in everything]
        # Modules may import each other in a circle, and a package its own module.
        for source in sources:
            if source not in self._following and self._has(source.module):
                self._following.add(source)
                found = self.find(source.module, source.name)
                self._following.discard(source)
                if found is not None:
                    return found
        return self.find(f"{module}.{name}")

    def _has(self, module: str) -> bool:
        return module.partition(".")[0] == self._package

    def line(self, found: Found) -> Iterator[Found]:
        """Return a class of the tree and all its ancestors in the tree, nearest first."""
        if isinstance(found.node, ast.ClassDef):
            yield found
            for base in found.node.bases:
                kind = self._class_named(found.module, base)
                if kind is not None and kind.node is not found.node:
                    yield from self.line(kind)

    def _class_named(self, module: str, name: ast.expr) -> Found | None:
        if isinstance(name, ast.Subscript):
            name = name.value
        text = name.value if isinstance(name, ast.Constant) else ast.unparse(name)
        return self.find(module, text) if isinstance(text, str) else None

    # ------------------------------------------------------------------ signatures

    def signature(self, found: Found, *, bound: bool) -> Signature | None:
        """Return what a function takes, or a class to make an object. None: it cannot be told.

        bound: the function is a method."""
        if isinstance(found.node, Function):
            static = "staticmethod" in map(ast.unparse, found.node.decorator_list)
            return Signature.of(found.node, bound=bound and not static)
        if not isinstance(found.node, ast.ClassDef):
            return None
        made_by = self._member(found, "__init__")
        if made_by is not None:
            return self.signature(made_by, bound=True)
        line = [kin.node for kin in self.line(found) if isinstance(kin.node, ast.ClassDef)]
        if any(_MAKES_FIELDS.search(text) for kin in line for text in _heads(kin)):
            return _of_fields(line)
        return None

    def methods(self, found: Found) -> dict[str, bool]:
        """Return the methods of a class, and whether a subclass must define them."""
        told: dict[str, bool] = {}
        for kin in self.line(found):
            for name, node in members(kin.node).items():
                if isinstance(node, Function):
                    marks = map(ast.unparse, node.decorator_list)
                    told.setdefault(name, any("abstractmethod" in mark for mark in marks))
        return told


def definitions(body: Iterable[ast.stmt], package: str = "") -> dict[str, Definition]:
    """Return what statements define and import, also in branches. The first definition counts.

    Of a function the last one counts: those before it are overloads.

    package: the package that relative imports begin at."""
    found: dict[str, Definition] = {}
    for node in _statements(body):
        if isinstance(node, Function | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                found.setdefault(
                    alias.asname or top, Import(alias.name if alias.asname else top, "")
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                source = Import(_absolute(node, package), alias.name)
                name = f"*{source.module}" if alias.name == "*" else alias.asname or alias.name
                found.setdefault(name, source)
        else:
            for target in _targets(node):
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, node)
    return found


@cache
def members(node: ast.AST | None) -> dict[str, ast.AST]:
    """Return what a class defines in its body, and what its methods set on `self`."""
    if not isinstance(node, ast.ClassDef):
        return {}
    found = {k: v for k, v in definitions(node.body).items() if isinstance(v, ast.AST)}
    for inner in ast.walk(node):
        for target in _targets(inner):
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                found.setdefault(target.attr, inner)
    return found


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, ()))
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)
        else:
            yield node


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """Return what a statement assigns to."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        yield node.target


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    return ".".join(filter(None, [*parts[: len(parts) - node.level + 1], node.module or ""]))


def _heads(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(part) for part in (*node.decorator_list, *node.bases)]


def _of_fields(line: list[ast.ClassDef]) -> Signature:
    """Return what makes an object of a class from its fields. line: the class and its ancestors."""
    fields: dict[str, bool] = {}
    for kin in reversed(line):
        for node in kin.body:
            if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
                continue
            default, options = node.value, {}
            if isinstance(default, ast.Call):
                options = {k.arg: ast.unparse(k.value) for k in default.keywords}
                if ast.unparse(default.func).endswith(("field", "Field")):
                    default = default if _DEFAULTS & options.keys() or default.args else None
            if "ClassVar" not in ast.unparse(node.annotation) and options.get("init") != "False":
                fields[node.target.id] = default is None
    required = frozenset(name for name, needed in fields.items() if needed)
    return Signature(tuple(fields), required=required)
