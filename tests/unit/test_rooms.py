"""Rules that are read from the source: which room may import which (docs/architecture.md), private
names in tests, fields that nobody reads."""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from tests.support.late import READ_WITH_TESTS

ROOT = Path(__file__).resolve().parents[2]
CORE = "core"
ROLE = frozenset({"registry", "engine", "queue", "transfer", "worker"})
ROOMS = {
    # room: (folder, other rooms it may import; all may import core)
    CORE: ("pullfill", frozenset[str]()),
    "registry": ("pullfill/registry", frozenset[str]()),
    "engine": ("pullfill/engine", frozenset[str]()),
    "demo": ("pullfill/demo", frozenset[str]()),
    "queue": ("queue", frozenset[str]()),
    "transfer": ("transfer", frozenset[str]()),
    "decode_worker": ("decode_worker", ROLE),
    "worker": ("pullfill/worker", ROLE - {"worker"}),
    "prefill_worker": ("prefill_worker", ROLE),
    "frontend": ("frontend", frozenset({"registry", "engine"})),
    # Stand-ins for tests and benchmarks: no room may import it.
    "testing": ("pullfill/testing", frozenset({"engine"})),
    # deploy starts the others through `MODULE.run`, see ENTRY_POINTS, and reads the registry.
    "deploy": ("deploy", frozenset({"registry"})),
}
CORE_FOLDERS = ("wire", "net", "runtime", "prefix")
ALLOWED = {room: allowed for room, (_, allowed) in ROOMS.items()}

ENTRY_POINTS = {
    "pullfill.worker.process",
    "pullfill.frontend.main",
    "pullfill.frontend.live.alone",
    "pullfill.demo.recipe",
    "pullfill.engine.check",
    "pullfill.queue.nats_connection",
}
"""What deploy may import of rooms it otherwise knows only by their command lines."""

COMMAND = ("__main__.py", "pullfill.deploy.cli")
"""`python -m pullfill` is in the core folder, and runs deploy's command line."""

SIDES = ("decode_worker", "prefill_worker")
LOOPS = ("pullfill.engine.host", "pullfill.engine.life")
"""Our own loop. A side stands on EngineLoop and View, and not on who steps vLLM."""

HEAVY = {"vllm", "torch", "cupy", "transformers", "safetensors"}


def may_use(room: str, file: Path, package: str) -> bool:
    """Whether a heavy third party may be imported there."""
    connector = room == "worker" and file.name in ("connector.py", "stock_core.py")
    if room == "engine":
        return package != "cupy"
    if room == "testing":
        return package in ("torch", "vllm")
    if room == "demo":
        return package in ("torch", "safetensors")
    if package == "vllm":
        return connector
    if package in ("torch", "cupy"):
        return (room == "transfer" and not file.name.endswith("contract.py")) or connector
    return False


@cache
def parsed(source: str) -> ast.Module:
    """The tree of a file, which several rules look at."""
    return ast.parse(source)


def files_of(root: Path, room: str) -> list[Path]:
    """Python files of one room; the core is pullfill/ without the rooms in it."""
    folder = root / ROOMS[room][0]
    if room != CORE:
        return sorted(folder.rglob("*.py"))
    return sorted(
        [*folder.glob("*.py"), *(f for n in CORE_FOLDERS for f in (folder / n).glob("*.py"))]
    )


def imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, also inside functions; relative ones made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                head = ".".join(parents[: len(parents) - node.level + 1])
                base = f"{head}.{base}".strip(".")
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and _imports_by_name(node):
            (name,) = node.args[:1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value


def _imports_by_name(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    name = node.func.id if isinstance(node.func, ast.Name) else name
    return name in ("import_module", "__import__") and bool(node.args)


def room_of(module: str) -> str | None:
    """The room of `pullfill.x...`; None for third parties."""
    parts = module.split(".")
    if parts[0] != "pullfill":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else CORE


def violations(root: Path) -> list[str]:
    """Every broken rule as `file:line what`."""
    found: list[str] = []
    for room in ROOMS:
        package = "pullfill" if room == CORE else f"pullfill.{room}"
        for file in files_of(root, room):
            where = file.relative_to(root)
            tree = parsed(file.read_text())
            if room in SIDES:
                found += [f"{where}:{line} {what}" for line, what in not_by_ports(tree, package)]
            for line, module in imports(tree, package):
                top, other = module.split(".")[0], room_of(module)
                if top in HEAVY and not may_use(room, file, top):
                    found.append(f"{where}:{line} {room} must not import {top}")
                if top in ROOMS and top != "queue" and (root / top).is_dir():
                    found.append(f"{where}:{line} write pullfill.{top}")
                if other in (None, CORE, room) or other in ALLOWED[room]:
                    continue
                entry = any(module == e or module.startswith(f"{e}.") for e in ENTRY_POINTS)
                command = room == CORE and (file.name, module.rpartition(".")[0]) == COMMAND
                if not (room == "deploy" and entry) and not command:
                    found.append(f"{where}:{line} {room} must not import {other}")
            if room != CORE and file.stem in sys.stdlib_module_names and file.stem != "__init__":
                found.append(f"{where}: named like a standard module")
    if (root / "queue" / "__init__.py").exists():
        found.append("queue/__init__.py hides the standard library's queue and breaks torch")
    return found


def not_by_ports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Where a side reaches past its ports: to our own loop, or to vLLM's engine core."""
    for line, module in imports(tree, package):
        if module.startswith(LOOPS):
            yield line, f"a side must not import {module}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "core":
            yield node.lineno, "a side must not use vLLM's core"


@contextmanager
def many_trees() -> Iterator[None]:
    """Collect no garbage inside. What exists at the end is never looked at for garbage.

    Trees have so many parts that the collector takes as long as reading the files."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def test_rooms_import_only_what_they_may() -> None:
    with many_trees():
        assert violations(ROOT) == []


def test_every_room_is_looked_at() -> None:
    for room in ROOMS:
        assert files_of(ROOT, room), room
    outside = {path.name for path in (ROOT / "pullfill").iterdir() if path.is_dir()}
    assert outside - {"__pycache__"} == (set(ROOMS) - {CORE}) | set(CORE_FOLDERS)


@pytest.mark.parametrize(
    ("file", "code", "expected"),
    [
        ("decode_worker/a.py", "def f():\n    from pullfill import frontend", "import frontend"),
        ("queue/a.py", "from ..transfer import contract", "must not import transfer"),
        ("transfer/contract.py", "import torch", "must not import torch"),
        ("decode_worker/a.py", "import importlib\nimportlib.import_module('vllm')", "import vllm"),
        ("pullfill/a.py", "from pullfill.registry import keys", "core must not import registry"),
        ("pullfill/engine/a.py", "from pullfill import testing", "must not import testing"),
        ("deploy/a.py", "from pullfill.decode_worker.ledger import Ledger", "import decode_worker"),
        ("deploy/a.py", "from transfer.contract import Owner", "write pullfill.transfer"),
        ("decode_worker/a.py", "from pullfill.engine import host", "a side must not import"),
        ("prefill_worker/a.py", "def f(engine): engine.core.step()", "must not use vLLM's core"),
        ("queue/types.py", "", "named like a standard module"),
        ("queue/__init__.py", "", "breaks torch"),
    ],
)
def test_a_violation_is_found(tmp_path: Path, file: str, code: str, expected: str) -> None:
    for folder, _ in ROOMS.values():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(code)
    found = violations(tmp_path)
    assert len(found) == 1, found
    assert expected in found[0]


def test_reading_unit_and_contract_tests_imports_no_large_module(
    request: pytest.FixtureRequest,
) -> None:
    """`make test-fast` would pay for the import before it forks: vLLM takes five seconds."""
    folders = {item.path.relative_to(ROOT).parts[:2] for item in request.session.items}
    if folders - {("tests", "unit"), ("tests", "contract"), ("benchmarks", "tests")}:
        pytest.skip("tests of other folders were read too")
    assert request.config.stash[READ_WITH_TESTS] == []


# A test that needs a private name breaks with each change inside. Lower the ceiling with the count,
# never raise it.
PRIVATE_USES = 165
_PRIVATE = re.compile(r"(?<!\bself)(?<!\bcls)\._(?!_|replace\()\w+")


def test_uses_of_private_attributes_may_only_fall() -> None:
    """Each `x._name` in tests, x not `self` or `cls`. `_replace` of a NamedTuple is public."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {name}"
        for tree in ("tests", "benchmarks")
        for path in sorted((ROOT / tree).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for name in _PRIVATE.findall(line)
    ]
    assert len(found) <= PRIVATE_USES, "use public names:\n" + "\n".join(found)


# --------------------------------------------------------------------------- what is sent is read

READ_WHOLE = {
    "Compat": "hashed, and compared field by field with `differs_from`",
    "ExplainRecord": "shown as JSON by `pullfill explain --json`",
    "Expected": "part of ExplainRecord",
    "PredictedMs": "part of ExplainRecord",
    "Timings": "part of ExplainRecord",
    "StageTimings": "named like those of Timings, which it fills",
    "LoadReport": "shown as JSON in /pullfill/status",
    "QueueStatus": "shown as JSON in /pullfill/status",
}


# They must be there as long as the wire has this version.
READ_BY_OLDER_BUILDS = {"NcclUse.generation", "NixlRuns.generation"}


def unread(sources: list[str]) -> set[str]:
    """Return each field of a struct of `sources` that no expression or pattern there reads.

    Only names are compared. So a field that nobody reads is missed if another struct has a field of
    the same name that somebody reads."""
    fields, read = set[tuple[str, str]](), set[str]()
    for source in sources:
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.ClassDef) and "Message" in map(ast.unparse, node.bases):
                fields |= {
                    (node.name, part.target.id)
                    for part in node.body
                    if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
                }
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
            elif isinstance(node, ast.MatchClass):
                read |= set(node.kwd_attrs)
                if node.patterns:  # a pattern by position may read all fields of its class
                    read.add(ast.unparse(node.cls))
    return {f"{name}.{field}" for name, field in fields if not {name, field} & read}


def test_every_field_of_the_wire_is_read_outside_of_tests() -> None:
    with many_trees():
        found = unread([file.read_text() for room in ROOMS for file in files_of(ROOT, room)])
    assert {f for f in found if f.split(".")[0] not in READ_WHOLE} == READ_BY_OLDER_BUILDS


def test_a_field_that_nobody_reads_is_found() -> None:
    source = "class A(Message):\n  x: int\n  y: int\n\ndef f(a):\n  a.y = a.x"
    assert unread([source]) == {"A.y"}
