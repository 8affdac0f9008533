"""What is sent is read: no field of a wire struct that only tests look at."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("pullfill", "decode_worker", "deploy", "frontend", "prefill_worker", "queue", "transfer")

READ_WHOLE = {
    "Compat": "hashed, and compared field by field with `differs_from`",
    "ExplainRecord": "shown as JSON by `pullfill explain --json`",
    "Expected": "part of ExplainRecord",
    "PredictedMs": "part of ExplainRecord",
    "Timings": "part of ExplainRecord",
    "LoadReport": "shown as JSON in /pullfill/status",
    "QueueStatus": "shown as JSON in /pullfill/status",
}


def unread(sources: list[str]) -> set[str]:
    """Return each field of a struct of `sources` that no expression or pattern there reads.

    Only names are compared. So a field that nobody reads is missed if another struct has a field of
    the same name that somebody reads."""
    fields, read = set[tuple[str, str]](), set[str]()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
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


def test_every_field_is_read_outside_of_tests() -> None:
    files = [file for room in ROOMS for file in (ROOT / room).rglob("*.py")]
    found = unread([file.read_text() for file in files])
    assert {field for field in found if field.split(".")[0] not in READ_WHOLE} == set()


def test_a_field_that_nobody_reads_is_found() -> None:
    source = "class A(Message):\n  x: int\n  y: int\n\ndef f(a):\n  a.y = a.x"
    assert unread([source]) == {"A.y"}
