"""What a function takes and what a call gives, as far as the source shows it."""

from __future__ import annotations

import ast
from dataclasses import dataclass

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Call:
    """What one call gives.

    positional: number of arguments without a name.
    named: the names of the others.
    open: it also unpacks a list or a dict, whose content the source does not show."""

    positional: int
    named: frozenset[str]
    open: bool

    @classmethod
    def of(cls, node: ast.Call) -> Call:
        """Read a call."""
        starred = any(isinstance(argument, ast.Starred) for argument in node.args)
        names = {keyword.arg for keyword in node.keywords}
        return cls(len(node.args), frozenset(n for n in names if n), starred or None in names)


@dataclass(frozen=True, slots=True)
class Signature:
    """What a function takes, without `self`.

    positional: the parameters that a call may give by position.
    keyword: those that it may give by name only.
    required: those without a default.
    args, kwargs: whether it takes any others by position or by name."""

    positional: tuple[str, ...]
    keyword: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    args: bool = False
    kwargs: bool = False

    @classmethod
    def of(cls, node: Function, *, bound: bool) -> Signature:
        """Read a function.

        bound: it is a method, whose first parameter vLLM's callers do not give."""
        given = node.args
        positional = [a.arg for a in (*given.posonlyargs, *given.args)]
        with_default = set(positional[len(positional) - len(given.defaults) :])
        positional = positional[1:] if bound else positional
        optional = with_default | {
            a.arg for a, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default
        }
        keyword = frozenset(a.arg for a in given.kwonlyargs)
        return cls(
            tuple(positional),
            keyword,
            frozenset({*positional, *keyword} - optional),
            given.vararg is not None,
            given.kwarg is not None,
        )

    def __str__(self) -> str:
        parts = [n if n in self.required else f"{n}=…" for n in self.positional]
        parts += ["*args"] if self.args else ["*"] if self.keyword else []
        parts += [n if n in self.required else f"{n}=…" for n in sorted(self.keyword)]
        return f"({', '.join([*parts, '**kwargs'] if self.kwargs else parts)})"

    def takes(self, call: Call) -> bool:
        """Whether this call works."""
        names = {*self.positional, *self.keyword}
        if not self.kwargs and call.named - names:
            return False
        if not self.args and call.positional > len(self.positional):
            return False
        return call.open or not self.required - call.named - {*self.positional[: call.positional]}

    def stands_for(self, base: Signature) -> bool:
        """Whether a method with this signature can override one with the signature `base`."""
        mine = self.positional[: len(base.positional)]
        by_position = mine == base.positional[: len(mine)]  # vLLM may give them by name as well
        enough = self.args or len(mine) == len(base.positional)
        by_name = self.kwargs or base.keyword <= {*self.keyword, *self.positional}
        rest = (self.args or not base.args) and (self.kwargs or not base.kwargs)
        known = {*base.positional, *base.keyword}
        return by_position and enough and by_name and rest and self.required <= known

    def takes_all_of(self, older: Signature) -> bool:
        """Whether every call that fits the signature `older` fits this one, too."""
        kept = self.positional[: len(older.positional)] == older.positional or self.args
        names = {*self.positional, *self.keyword}
        named = self.kwargs or {*older.positional, *older.keyword} <= names
        return kept and named and self.required <= older.required
