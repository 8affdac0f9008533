"""docs/architecture.md names nine steps, and the functions that take them: they are in the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
LIFE = PAGE.split("\n## Life of a request\n")[1].split("\n## Words\n")[0]
ROW = re.compile(r"^\| (\d+) \| \*\*([\w ]+)\.\*\* .*? \| ([^|]+) \| [^|]+ \|$", re.M)
FUNCTION = re.compile(r"\[`([\w/]+\.py)`\]\(\.\./\1\) `(\w+)`")
HEADING = re.compile(r"^ +# -+ step (\d+): (\w+)$", re.M)
ROOMS = ("decode_worker", "prefill_worker", "frontend", "pullfill/engine")
VLLMS = {"render": "add_request_async"}
"""vLLM renders the prompt. This function of ours gets what it has rendered."""


@cache
def defined(path: Path) -> frozenset[str]:
    """Names of the functions and methods of a file."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return frozenset(n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def steps(text: str) -> list[tuple[int, str, list[tuple[str, str]]]]:
    """(number, name, [(file, function)]) of each row of the table."""
    return [
        (int(number), title.lower().replace(" ", "_"), FUNCTION.findall(where))
        for number, title, where in ROW.findall(text)
    ]


def faults(text: str) -> list[str]:
    """What the document says and the code does not, and what the code says of steps alone."""
    table = steps(text)
    found = [] if [n for n, _, _ in table] == list(range(1, 10)) else ["not the steps 1 to 9"]
    named = {(number, *place) for number, _, places in table for place in places}
    for number, step, places in table:
        for file, function in places:
            path = ROOT / file
            if not path.is_file() or function not in defined(path):
                found.append(f"step {number}: {file} has no {function}")
        if VLLMS.get(step, step) not in [function for _, function in places]:
            found.append(f"step {number}: no function {step}")
    for path in sorted(p for room in ROOMS for p in (ROOT / room).glob("*.py")):
        file = str(path.relative_to(ROOT))
        for number, function in HEADING.findall(path.read_text()):
            if (int(number), file, function) not in named:
                found.append(f"{file} says step {number}: {function}")
    return found


def test_each_step_is_a_function_of_its_name() -> None:
    assert faults(LIFE) == []


def test_a_step_that_moved_is_noticed() -> None:
    for old, new, what in (
        ("`enqueue`", "`publish_all`", "has no publish_all"),
        ("`enqueue`", "`step_done`", "no function enqueue"),
        ("`enqueue`", "`step_done`", "says step 4: enqueue"),
        (
            "`decode_worker/handoff.py`](../decode_worker/handoff.py)",
            "`a.py`](../a.py)",
            "no grant",
        ),
        ("| 4 | **Enqueue", "| 4 | Enqueue", "not the steps"),
    ):
        assert old in LIFE
        assert any(what in fault for fault in faults(LIFE.replace(old, new))), what
