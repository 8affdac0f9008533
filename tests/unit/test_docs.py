"""What the documents name exists: links, commands, flags, messages, tests, targets."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest

from pullfill import wire
from pullfill.decode_worker import rules
from pullfill.engine import front_wire
from pullfill.errors import Outcome
from tests.support.docs import (
    CODE,
    NAMES,
    ROOT,
    code_of,
    commands,
    flags,
    python_files,
    text_of,
)


def section(begin: str, end: str) -> str:
    """Of docs/architecture.md, from one heading to another."""
    return text_of("docs/architecture.md").split(f"\n{begin}\n")[1].split(f"\n{end}\n")[0]


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", text_of(name))):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def anchors(file: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", file.read_text(), flags=re.S), re.M
    )
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


# The owners in promises.md: test_docs_fault_rows.py.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "docs/promises.md"])
def test_files_and_tests_named_exist(name: str) -> None:
    missing = []
    for path, test in re.findall(r"`((?:\w+/)+\w+\.py)(?:::(\w+))?`", text_of(name)):
        # engine/ and registry/ are often named without the package in front.
        found = [p for p in (ROOT / path, ROOT / "pullfill" / path) if p.is_file()]
        if path == "queue/__init__.py":  # named because it must not be there
            assert not found
            continue
        if not found or (test and test not in functions(found[0])):
            missing.append(f"{path}::{test}")
    assert missing == []


@cache
def functions(path: Path) -> frozenset[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return frozenset(n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def test_documents_named_in_the_code_exist() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {named}"
        for path in python_files()
        for named in re.findall(r"docs/[\w-]+\.md", path.read_text())
        if not (ROOT / named).is_file()
    ]
    assert missing == []


def test_every_document_is_in_the_readme() -> None:
    readme = text_of("README.md")
    assert [d.name for d in (ROOT / "docs").glob("*.md") if f"docs/{d.name}" not in readme] == []


def shell_parts(code: str) -> Iterator[str]:
    """The inside of each `$( )`, then the rest with a word in its place."""
    while inner := re.search(r"\$\(([^()]*)\)", code):
        yield inner[1]
        code = f"{code[: inner.start()]}X{code[inner.end() :]}"
    yield code


def used_commands(name: str) -> Iterator[tuple[str, list[str]]]:
    """(command, flags) of each `pullfill …` in the code of a document."""
    for part in (part for code in code_of(name) for part in shell_parts(code)):
        for line in re.findall(r"(?:^|[`(|&$ ])pullfill +([a-z][^`\n|&;>]*)", part, re.M):
            words = line.split()
            sub = " ".join(words[:2])
            command = sub if sub in commands() else words[0]
            yield command, [w.split("=")[0] for w in words if w.startswith("--")]


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_their_flags_exist(name: str) -> None:
    unknown = []
    for command, used in used_commands(name):
        if command not in commands():
            unknown.append(command)
            continue
        if not commands()[command].ignore_unknown_options:
            unknown += [f"{command} {f}" for f in used if f not in flags(commands()[command])]
    assert unknown == []


WIRE_PARTS = ("pullfill.wire.codec", "pullfill.wire.records")


def structs(module: object) -> list[type[msgspec.Struct]]:
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, msgspec.Struct)
        and value.__module__ in (getattr(module, "__name__", ""), *WIRE_PARTS)
    ]


@pytest.mark.parametrize("struct", [*structs(wire), *structs(front_wire)], ids=lambda s: s.__name__)
def test_every_struct_is_named_and_described(struct: type[msgspec.Struct]) -> None:
    assert f"`{struct.__name__}`" in text_of("docs/wire.md")
    assert struct.__doc__


def test_every_kind_of_message_and_reason_is_described() -> None:
    text = text_of("docs/wire.md")
    kinds = [v.decode() for v in vars(front_wire).values() if isinstance(v, bytes)]
    assert kinds
    assert [k for k in kinds if f"`{k}`" not in text] == []
    assert [r.value for r in wire.RefuseReason if f"`{r.value}`" not in text] == []


def test_every_reason_of_the_router_is_described() -> None:
    text = section("## Life of a request", "## Words")
    reasons = {rule.__name__ for rule in rules.RULES} - {"engine", "cost"}
    for path in ("rules", "scheduler"):
        source = text_of(f"decode_worker/{path}.py")
        for made in re.findall(r"Decision\(([^)]*)", source):
            reasons |= set(re.findall(r"\"(\w+)\"", made))
        reasons |= set(re.findall(r"\"(cost_\w+)\"", source))
        reasons |= set(re.findall(r"^[A-Z_]+ = \"([a-z_]+)\"$", source, re.M))
    assert {"long_prompt", "short_prompt", "multimodal", "engine_declined"} <= reasons
    assert {"cost_remote", "cost_local", "cost_probe"} <= reasons
    assert sorted(r for r in reasons if f"`{r}`" not in text) == []


def test_every_outcome_in_use_is_described() -> None:
    text = section("## Life of a request", "## Words") + text_of("docs/wire.md")
    used = "".join(p.read_text() for p in (ROOT / "decode_worker").glob("*.py"))
    outcomes = [o for o in Outcome if f"Outcome.{o.name}" in used]
    assert len(outcomes) > 5
    assert [o.value for o in outcomes if f"`{o.value}`" not in text] == []


@pytest.mark.parametrize("name", NAMES)
def test_make_targets_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):(?!=)", text_of("Makefile"), re.M))
    benches = {f"bench-{p.stem[6:].replace('_', '-')}" for p in ROOT.glob("benchmarks/bench_*.py")}
    used = {t for code in code_of(name) for t in re.findall(r"(?:^|`)make ([a-z-]+)", code, re.M)}
    assert used <= targets | benches
