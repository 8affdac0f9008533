"""What is sent is read: no field of a wire struct that only tests look at."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.trees import many_trees
from tests.support.wire_reads import unread

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

DROPPED = {
    "Claim.delivery", "Commit.parts", "Commit.prefix_read_bytes", "CommitReply.job_id",
    "DecodeWelcome.incarnation", "DecodeWelcome.max_num_batched_tokens",
    "DecodeWelcome.max_num_seqs", "DrainAck.attempt", "DrainAck.incarnation", "DrainAck.job_id",
    "Hello.host_id", "Hello.transports", "PrefillJob.control",
    "Ready.parts", "Ready.prefix_read_bytes", "Refused.job_id", "RegionDescriptor.block_size",
    "RegionDescriptor.epoch", "Revoke.incarnation", "SelfCheck.checked_at",
    "StageTimings.queue_ms", "Welcome.incarnation", "WorkerRecord.version",
    "WorkerRecord.world_size",
}  # fmt: skip
"""Fields that were sent once and that nobody read."""


@pytest.fixture(scope="module")
def found() -> set[str]:
    """Unread fields of the source, with the dropped ones declared again."""
    files = [file for room in ROOMS for file in (ROOT / room).rglob("*.py")]
    with many_trees():
        trees = {str(file): ast.parse(file.read_text()) for file in files}
        for tree in trees.values():
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and "Message" in map(ast.unparse, node.bases):
                    again = [f.split(".")[1] for f in DROPPED if f.startswith(f"{node.name}.")]
                    node.body += [ast.parse(f"{name}: Count").body[0] for name in again]
        return set(unread(trees))


def test_every_field_is_read_outside_of_tests(found: set[str]) -> None:
    sent = {field for field in found - DROPPED if field.split(".")[0] not in READ_WHOLE}
    assert sent == set()


def test_each_dropped_field_would_be_found(found: set[str]) -> None:
    assert found >= DROPPED


STRUCT = "class Said(Message):\n    kept: Id\n    lost: Id\n\nclass Other:\n    lost: str\n"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def f(said: Said): return said.kept, said.lost", []),
        ("def f(said: Said): return said.kept", ["Said.lost"]),
        ("def f(said: Said, o: Other): return said.kept, o.lost", ["Said.lost"]),
        ("def f(): return Said(kept='', lost='')", ["Said.kept", "Said.lost"]),
        ("def f(x):\n  match x:\n    case Said(kept=k, lost=m): return k, m", []),
        ("def f(x):\n  match x:\n    case Said(): x.kept\n    case Other(): x.lost", ["Said.lost"]),
        ("def f(data):\n  said = decode(data, Said)\n  return said.kept, said.lost", []),
        ("def f(all: list[Said]):\n  return [(s.kept, s.lost) for s in all]", []),
        ("class A:\n  def __init__(self, s: Said): self.s = s\n  def f(self): self.s.lost",
         ["Said.kept"]),
        ("def f(said: Said, x):\n  return said.kept, x.lost", []),
    ],
)  # fmt: skip
def test_what_counts_as_reading(code: str, found: list[str]) -> None:
    assert unread({"a.py": ast.parse(STRUCT + code)}) == found
