"""Tells which of the names that pullfill uses another release of vLLM lacks, or has changed.

It reads Python files only, and imports neither release. A name that is there may still do something
else than before: only the tests tell that (`make test-vllm`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pullfill
from pullfill.engine.names import uses
from pullfill.engine.names.tree import Found, Tree
from pullfill.engine.names.uses import Use
from pullfill.errors import ConfigError

GONE = "is gone"
_PLACES = 3
"""Name at most this many modules that a name may have moved to."""


@dataclass(frozen=True, slots=True)
class Change:
    """A name of vLLM that is gone or has changed.

    name: its dotted name.
    what: what has become of it.
    where: the file and line of pullfill that uses it.
    added: only methods were added to a class that pullfill inherits from or stands for."""

    name: str
    what: str
    where: str
    added: bool = False


def changes(release: Path) -> tuple[int, list[Change]]:
    """Compare a release with the installed one. Return how many names were looked at, and changes.

    release: the directory that holds its folder `vllm`.

    Raises ConfigError: there is no vLLM there, or none is installed."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("vLLM is not installed here, so nothing can be compared: make install")
    old, new = Tree(Path(spec.submodule_search_locations[0]).parent), Tree(release)
    if not new.names_of("vllm"):
        raise ConfigError(f"{release} has no folder vllm with Python files")
    return compare(uses.of_package(Path(pullfill.__file__).parent), old, new)


def compare(used: Iterable[Use], old: Tree, new: Tree) -> tuple[int, list[Change]]:
    """Return how many names `old` has, and which of them `new` lacks or has changed."""
    names = set()
    found: dict[tuple[str, str], Change] = {}
    for use in used:
        before = old.find(*use.name)
        if before is None:
            continue  # it is ours, or of another release
        names.add(use.name)
        name, what = use.name, problem(use, new)
        if what == GONE:
            name = _outermost(name, new)
            places = [] if "." in name[1] else new.defining(name[1])[:_PLACES]
            what += f"; there is one in {', '.join(places)}" if places else ""
        elif not what and use.listed:
            what = _differs(before, old, use, new)
        if what and problem(use, old) != what:
            change = Change(".".join(filter(None, name)), what, use.where)
            found.setdefault((change.name, what), change)
        if use.provides is not None and (more := _added(use, old, new)):
            what = f"has new methods: {', '.join(more)}"
            change = Change(".".join(use.name), what, use.where, added=True)
            found.setdefault((change.name, what), change)
    return len(names), list(found.values())


def problem(use: Use, tree: Tree) -> str:
    """Return why a use does not fit a release. Empty: it does, as far as names tell."""
    found = tree.find(*use.name)
    if found is None:
        return GONE
    if use.provides is not None:
        lacking = sorted(
            k for k, must in tree.methods(found).items() if must and k not in use.provides
        )
        return f"has abstract methods that pullfill's class lacks: {lacking}" if lacking else ""
    takes = tree.signature(found, bound="." in use.name[1])
    if takes is None:
        return ""
    if use.call is not None and not takes.takes(use.call):
        return f"takes {takes}, which does not fit the call"
    if use.overrides is not None and not use.overrides.stands_for(takes):
        return f"takes {takes}, and the method that overrides it {use.overrides}"
    return ""


def _added(use: Use, old: Tree, new: Tree) -> list[str]:
    """Return the public methods that a class has gained, and that our class does not define."""
    before, now = old.find(*use.name), new.find(*use.name)
    if before is None or now is None:
        return []
    more = new.methods(now).keys() - old.methods(before).keys() - (use.provides or set())
    return sorted(name for name in more if not name.startswith("_"))


def _outermost(name: tuple[str, str], tree: Tree) -> tuple[str, str]:
    """Return the class that is gone, if a member of it was looked for."""
    module, path = name
    while "." in path and tree.find(module, path.rpartition(".")[0]) is None:
        path = path.rpartition(".")[0]
    return module, path


def _differs(before: Found, old: Tree, use: Use, new: Tree) -> str:
    """Return how a function that is called through an object has changed for its callers."""
    now = new.find(*use.name)
    if now is None or isinstance(now.node, ast.ClassDef):
        return ""
    took, takes = old.signature(before, bound=True), new.signature(now, bound=True)
    if took is None or takes is None or takes.takes_all_of(took):
        return ""
    return f"takes {takes}, and took {took} before"
