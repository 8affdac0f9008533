"""Which fields of the wire's structs the source reads, found in its syntax trees.

`unread` infers the class of each expression `x` in `x.field` from annotations, calls, `isinstance`
and `match`. Where it cannot, `x` may be any struct that the module names.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

Names = frozenset[str]
ANY: Names = frozenset({"Any"})
_UNKNOWN = {"Any", "object", "T", "V"}


def _names(node: ast.AST | None) -> Names:
    """Every name in an annotation or a class expression."""
    found = set[str]()
    for part in ast.walk(node) if node is not None else ():
        if isinstance(part, ast.Name):
            found.add(part.id)
        elif isinstance(part, ast.Attribute):
            found.add(part.attr)
        elif isinstance(part, ast.Constant) and part.value is None:
            found.add("None")
    return frozenset(found)


@cache
def _nodes(module: ast.Module) -> list[ast.AST]:
    """All nodes. A walk through all of the source takes half a second."""
    return list(ast.walk(module))


class Source:
    """All classes, functions and unions of some modules, by name."""

    def __init__(self, modules: Mapping[str, ast.Module]) -> None:
        self.modules = modules
        self.structs: dict[str, dict[str, Names]] = {}
        """Fields of each struct, with the names in their annotations."""
        self.members: dict[str, dict[str, Names]] = defaultdict(dict)
        self.returns: dict[str, Names] = {}
        self.bases: dict[str, Names] = {}
        self.unions: dict[str, Names] = {}
        for module in modules.values():
            for node in _nodes(module):
                if isinstance(node, ast.ClassDef):
                    self._add_class(node)
            for node in module.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    known = self.returns.get(node.name, frozenset())
                    self.returns[node.name] = known | (_names(node.returns) or ANY)
                elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
                    for target in node.targets:
                        self.unions |= {name: _names(node.value) for name in _names(target)}

    def _add_class(self, node: ast.ClassDef) -> None:
        members = self.members[node.name]
        self.bases[node.name] = frozenset().union(*map(_names, node.bases))
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                members[part.target.id] = _names(part.annotation)
                if "Message" in self.bases[node.name]:
                    fields = self.structs.setdefault(node.name, {})
                    fields[part.target.id] = _names(part.annotation)
            elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                members[part.name] = _names(part.returns) or ANY
                arguments = {a.arg: _names(a.annotation) or ANY for a in _arguments(part.args)}
                for line in ast.walk(part):
                    if isinstance(line, ast.AnnAssign) and _of_self(line.target):
                        members[line.target.attr] = _names(line.annotation)  # type: ignore[union-attr]
                    elif isinstance(line, ast.Assign):
                        for target in filter(_of_self, line.targets):
                            told = _made_of(line.value, arguments)
                            members.setdefault(target.attr, told)  # type: ignore[attr-defined]

    def expand(self, names: Names) -> Names:
        """With the members of unions in place of the unions' names."""
        while known := names & self.unions.keys():
            names = frozenset().union(names - known, *(self.unions[name] for name in known))
        return names

    def member(self, owner: str, name: str) -> Names | None:
        """The names in the annotation of a member. None: the class is not known, or has none."""
        if (told := self.members.get(owner, {}).get(name)) is not None:
            return told
        inherited = (self.member(base, name) for base in self.bases.get(owner, ()) if base != owner)
        return next(filter(None, inherited), None)


def _arguments(arguments: ast.arguments) -> Iterator[ast.arg]:
    yield from (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)


def _made_of(value: ast.expr, arguments: Mapping[str, Names]) -> Names:
    """What `self.x = value` says about `x`."""
    match value:
        case ast.Name(id=name):
            return arguments.get(name, ANY)
        case ast.BoolOp(values=[ast.Name(id=name), *_]):
            return arguments.get(name, ANY)
        case ast.Call(func=ast.Name(id=name)) if name.lstrip("_")[:1].isupper():
            return frozenset({name})
        case ast.ListComp(elt=part) | ast.List(elts=[part]):
            return _made_of(part, arguments)
    return ANY


def _of_self(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


class _Reads(ast.NodeVisitor):
    """Collects (struct, field) of all reads in one module."""

    def __init__(self, source: Source, module: ast.Module) -> None:
        self._source = source
        self._mentioned = self._reachable(source.expand(_taken(module)))
        self._of_lambdas = ANY | self._given(module)
        self._scopes: list[dict[str, Names]] = [{}]
        self._function: dict[str, Names] = {}
        self._class: str | None = None
        self.found: set[tuple[str, str]] = set()

    def _given(self, module: ast.Module) -> Names:
        """What the classes that the module makes pass to the callbacks that it gives them."""
        calls = [node.func for node in _nodes(module) if isinstance(node, ast.Call)]
        made = {func.id for func in calls if isinstance(func, ast.Name)}
        members = [self._source.members[name] for name in made if name in self._source.bases]
        told = [names for found in members for names in found.values() if "Callable" in names]
        return frozenset().union(*told)

    def _reachable(self, names: Names) -> Names:
        """And the classes of the fields of these structs."""
        while True:
            structs = [self._source.structs[name] for name in names if name in self._source.structs]
            more = names.union(*(told for fields in structs for told in fields.values()))
            if more == names:
                return names
            names = more

    # ---------------------------------------------------------------- what an expression may be

    def _may_be(self, node: ast.expr) -> Names:
        source = self._source
        match node:
            case ast.Name(id=name):
                known = (scope[name] for scope in reversed(self._scopes) if name in scope)
                if (told := next(known, None)) is not None:
                    return told
                return frozenset({name}) if name in source.members else ANY
            case ast.Attribute(value=value, attr=attr):
                owners = self._may_be(value)
                told = [t for o in owners if (t := source.member(o, attr)) is not None]
                return source.expand(frozenset().union(*told)) if told else ANY
            case ast.Call(func=func, args=args):
                return self._result(func, args)
            case ast.Await(value=value) | ast.Subscript(value=value) | ast.Starred(value=value):
                return self._may_be(value)
            case ast.NamedExpr(value=value):
                return self._may_be(value)
            case ast.IfExp(body=body, orelse=other):
                return self._may_be(body) | self._may_be(other)
            case ast.Constant():
                return frozenset({"constant"})
        return ANY

    def _result(self, func: ast.expr, args: list[ast.expr]) -> Names:
        name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
        if name in self._source.members and name in self._source.bases:
            return frozenset({name})
        told = self._may_be(func) if isinstance(func, ast.Attribute) else ANY
        if told == ANY and isinstance(func, ast.Attribute):
            owner = self._may_be(func.value)
            if not owner & _UNKNOWN:
                return owner  # `get` of a dictionary: what is in it
        if isinstance(func, ast.Name) or told == ANY:
            told = self._source.returns.get(name, ANY)
        if told & _UNKNOWN:  # `decode(data, Claim)` returns a Claim
            given = self._source.expand(frozenset().union(*map(_names, args)))
            kinds = given & self._source.structs.keys()
            return kinds or ANY
        return self._source.expand(told)

    # ---------------------------------------------------------------- scopes

    def _bind(self, target: ast.expr, told: Names) -> None:
        for part in ast.walk(target):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                known = self._function.get(part.id, frozenset())
                self._function[part.id] = known | told

    def _within(self, scope: dict[str, Names], parts: Iterable[ast.AST]) -> None:
        self._scopes.append(scope)
        for part in parts:
            self.visit(part)
        self._scopes.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self._class = self._class, node.name
        self.generic_visit(node)
        self._class = outer

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = {
            a.arg: self._source.expand(_names(a.annotation) or ANY) for a in _arguments(node.args)
        }
        if self._class is not None:
            arguments["self"] = frozenset({self._class})
        outer, self._function = self._function, arguments
        self._within(arguments, node.body)
        self._function = outer

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Lambda(self, node: ast.Lambda) -> None:
        arguments = {a.arg: self._of_lambdas for a in _arguments(node.args)}
        self._within(arguments, [node.body])

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            match target, node.value:
                case ast.Tuple(elts=parts), ast.Tuple(elts=values) if len(parts) == len(values):
                    for part, value in zip(parts, values, strict=True):
                        self._bind(part, self._may_be(value))
                case _:
                    self._bind(target, self._may_be(node.value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        self._bind(node.target, self._source.expand(_names(node.annotation)))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.generic_visit(node)
        self._bind(node.target, self._may_be(node.value))

    def visit_For(self, node: ast.For) -> None:
        self._bind(node.target, self._may_be(node.iter))
        self.generic_visit(node)

    def _comprehension(self, node: ast.ListComp) -> None:
        for part in node.generators:
            self._bind(part.target, self._may_be(part.iter))
        self.generic_visit(node)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension  # type: ignore[assignment]

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._within(self._told_by(node.test), node.body)
        self._within({}, node.orelse)

    def _told_by(self, test: ast.expr) -> dict[str, Names]:
        match test:
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=name), kinds]):
                return {name: self._source.expand(_names(kinds))}
        return {}

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        for case in node.cases:
            scope = {}
            if isinstance(node.subject, ast.Name) and isinstance(case.pattern, ast.MatchClass):
                scope[node.subject.id] = _names(case.pattern.cls)
            self._within(scope, [case])

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        self._read(_names(node.cls), node.kwd_attrs)
        self.generic_visit(node)

    # ---------------------------------------------------------------- reads

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            told = self._may_be(node.value)
            self._read(told | self._mentioned if told & _UNKNOWN else told, [node.attr])
        self.generic_visit(node)

    def _read(self, owners: Iterable[str], fields: Iterable[str]) -> None:
        self.found |= {(owner, field) for owner in owners for field in fields}


def _taken(module: ast.Module) -> Names:
    """Names that the module uses for more than what it makes and returns."""
    made = set[int]()
    for node in _nodes(module):
        if isinstance(node, ast.Call):
            made.add(id(node.func))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            made |= set(map(id, ast.walk(node.returns)))
    used = [node for node in _nodes(module) if id(node) not in made]
    names = {node.id for node in used if isinstance(node, ast.Name)}
    return frozenset(names | {node.attr for node in used if isinstance(node, ast.Attribute)})


def unread(modules: Mapping[str, ast.Module]) -> list[str]:
    """`Struct.field` of each field that no module reads. Versions are read by `decode`."""
    source, found = Source(modules), set[tuple[str, str]]()
    for module in modules.values():
        reads = _Reads(source, module)
        reads.visit(module)
        found |= reads.found
    return sorted(
        f"{struct}.{field}"
        for struct, fields in source.structs.items()
        for field, told in fields.items()
        if (struct, field) not in found and "Version" not in told
    )
