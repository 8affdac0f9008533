"""Tells what another release of vLLM has changed of what pullfill uses.

    .venv/bin/python -m tools.check_release vllm==0.34.0

It takes what pip can install, or a folder that holds `vllm`, and compares this with the installed
vLLM. griffe reads the files of both and imports neither.

Names that pullfill imports or lists are looked up exactly. But most objects of vLLM reach pullfill
as `Any`. So a member of a class counts if its name occurs anywhere in pullfill, and if the class is
in a module that pullfill names (a comment will do), or that such a module imports from. Therefore
some lines are about classes that pullfill does not use.
"""

from __future__ import annotations

import ast
import logging
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import griffe
from griffe import BreakageKind as Kind

from tools import vllm_names

Object = griffe.Object | griffe.Alias
GONE = Kind.OBJECT_REMOVED.value
HARMLESS = Kind.RETURN_CHANGED_TYPE, Kind.PARAMETER_CHANGED_DEFAULT, Kind.CLASS_REMOVED_BASE


class Uses:
    """What a package names. Each name comes with its first place, as file:line.

    exact: dotted names of vLLM that are imported, listed, or written in strings and comments.
    bases: those of them that classes of the package inherit from.
    words: attributes, parameters, functions, and strings that are identifiers."""

    def __init__(self, package: Path) -> None:
        self.exact: dict[str, str] = {}
        self.bases: dict[str, str] = {}
        self.words: dict[str, str] = {}
        walk = os.walk(package, followlinks=True)  # the rooms are links
        files = [Path(top, name) for top, _, names in walk for name in sorted(names)]
        texts = {file: file.read_text() for file in files if file.suffix == ".py"}
        # Files that name vLLM come first: a word there is most likely a member of its classes.
        for file in sorted(texts, key=lambda file: "vllm" not in texts[file]):
            self._read(texts[file], str(file.relative_to(package.parent)))
        for module, paths in vllm_names.NAMES.items():
            for path in paths:
                name = f"{module}.{path.replace(':', '.')}"
                self.exact.setdefault(name, self.exact.get(module, ""))

    def _read(self, text: str, file: str) -> None:
        for number, line in enumerate(text.splitlines(), 1):
            for name in re.findall(r"\bvllm(?:\.\w+)+|\bVLLM_\w+", line):
                self.exact.setdefault(name.replace("VLLM_", "vllm.envs.VLLM_"), f"{file}:{number}")
        imported: dict[str, str] = {}
        for node in ast.walk(ast.parse(text)):
            at = f"{file}:{getattr(node, 'lineno', 1)}"
            match node:
                case ast.ImportFrom(module=str(module)) if re.match(r"vllm\b", module):
                    imported |= {n.asname or n.name: f"{module}.{n.name}" for n in node.names}
                    self.exact = {f"{module}.{n.name}": at for n in node.names} | self.exact
                case ast.ClassDef():
                    bases = map(ast.unparse, node.bases)
                    self.bases |= {imported[base]: at for base in bases if base in imported}
                case ast.FunctionDef(name=word) | ast.AsyncFunctionDef(name=word):
                    self.words.setdefault(word, at)
                case ast.Attribute(attr=word) | ast.arg(arg=word) | ast.keyword(arg=str(word)):
                    self.words.setdefault(word, at)
                case ast.Constant(value=str(word)) if word.isidentifier():
                    self.words.setdefault(word, at)

    def place(self, obj: Object) -> str:
        """Return where the package uses an object of vLLM. Empty: nowhere."""
        if obj.path in self.exact or obj.parent is None:
            return self.exact.get(obj.path, "")
        if obj.parent.is_class:
            return "" if obj.name.startswith("__") else self.words.get(obj.name, "")
        members = obj.members.values() if not obj.is_alias and obj.is_class else ()
        return next(filter(None, map(self.place, members)), "")


def compare(uses: Uses, old: Object, new: Object) -> dict[tuple[str, str], str]:
    """Return the changes: a name of vLLM and what has become of it, with the place that uses it."""
    found: dict[tuple[str, str], str] = {}
    modules: dict[str, Object] = {}
    for name, at in uses.exact.items():
        obj, around = find(old, name), find(old, name.rpartition(".")[0])
        if obj and around:  # otherwise it is a name of yet another release
            modules |= {obj.module.path: obj.module, around.module.path: around.module}
            if not find(new, name):
                found[name, GONE] = at
    for module in list(modules.values()):
        aliases = [m for m in module.members.values() if isinstance(m, griffe.Alias)]
        imports = [find(old, alias.target_path) for alias in aliases]
        modules |= {obj.module.path: obj.module for obj in imports if obj and obj.is_class}
    # griffe compares what is public. So what pullfill uses is made public, and nothing else.
    for module in modules.values():
        make_public(module, uses)
    for path, module in modules.items():
        now = find(new, path)
        for breakage in griffe.find_breaking_changes(module, now) if now else ():
            at, parameter = uses.place(breakage.obj), parameter_of(breakage)
            unused = breakage.kind is Kind.PARAMETER_REMOVED and parameter not in uses.words
            if at and breakage.kind not in HARMLESS and not unused:
                what = f"{breakage.kind.value}: {parameter}".removesuffix(": ")
                found[breakage.obj.canonical_path, what] = at
        if not now and (at := next(filter(None, map(uses.place, module.members.values())), "")):
            found[path, GONE] = at
    for name, at in uses.bases.items():
        before, now = find(old, name), find(new, name)
        # What the old release's class lacks is new.
        for breakage in griffe.find_breaking_changes(now, before) if before and now else ():
            obj = breakage.obj
            if breakage.kind is Kind.OBJECT_REMOVED and obj.is_function:
                found[obj.canonical_path, "Method is new: override it if needed"] = at
            elif breakage.kind is Kind.PARAMETER_REMOVED and obj.name in uses.words:
                what = f"Parameter is new: {parameter_of(breakage)}"
                found[obj.canonical_path, what] = uses.words[obj.name]
    return found


def make_public(obj: Object, uses: Uses) -> None:
    for member in obj.members.values():
        member.public = bool(uses.place(member))
        if not member.is_alias and member.is_class:
            make_public(member, uses)


def find(vllm: Object, name: str) -> Object | None:
    """Return what a dotted name stands for in a release."""
    try:
        obj: Object = vllm[name.partition(".")[2]] if "." in name else vllm
        return obj.final_target if isinstance(obj, griffe.Alias) else obj
    except (KeyError, griffe.AliasResolutionError, griffe.CyclicAliasError):
        return None


def parameter_of(breakage: griffe.Breakage) -> str:
    """Return the parameter that a breakage is about. Those moved are many: the function will do."""
    value = breakage.old_value or breakage.new_value
    named = isinstance(value, griffe.Parameter) and breakage.kind is not Kind.PARAMETER_MOVED
    return value.name if named else ""


def load(folder: str | Path) -> Object:
    """Read the folder `vllm` in a folder. This takes half a minute."""
    loader = griffe.GriffeLoader(search_paths=[folder], allow_inspection=False)
    vllm = loader.load("vllm")
    loader.resolve_aliases(implicit=True, external=False)
    return vllm


def main(release: str) -> None:
    logging.getLogger("griffe").setLevel(logging.CRITICAL)
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        sys.exit("vLLM is not installed here: make install")
    with tempfile.TemporaryDirectory() as folder:
        if not Path(release).is_dir():
            options = "--no-deps", "--no-compile", "--target", folder
            subprocess.run([sys.executable, "-m", "pip", "install", *options, release], check=True)
        new = load(release if Path(release).is_dir() else folder)
    uses = Uses(Path(__file__).parents[1] / "pullfill")
    found = compare(uses, load(Path(spec.origin).parents[1]), new)
    for (name, what), at in sorted(found.items()):
        print(f"{name}\n    {what} ({at})")
    print(f"{len(found)} changes")


if __name__ == "__main__":
    main(sys.argv[1]) if len(sys.argv) == 2 else print(__doc__)
