"""`make zoo`: serve each model of the zoo, compare its answers with one engine's, print a table.

`--save` writes the table to benchmarks/results/zoo.md. Other arguments go to pytest, as `-k Gemma`.
Exit status: pytest's.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict

import pytest

from benchmarks.report import RESULTS
from tests.support.zoo import ZOO

TESTS = "tests/integration/test_models.py"
COLUMNS = ("cold", "chunked", "hit", "lora", "cancelled", "killed")
MEANINGS = """\
One cluster per row; random weights. `equal`: tokens and log probabilities are those of one plain
vLLM engine (with a LoRA adapter: those of a local prefill). cold: no prefix is cached. chunked:
prompts longer than a step. hit: a prefix on either side, or on both. cancelled: the client goes
away. killed: the prefill worker dies in the middle. `-`: see the notes.
"""


class Table:
    """A pytest plugin that remembers how each test of the zoo ended."""

    def __init__(self) -> None:
        self.cells: dict[str, dict[str, str]] = defaultdict(dict)
        self.notes: dict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        column, _, model = report.nodeid.partition("::test_")[2].rstrip("]").partition("[")
        if report.failed:
            self.cells[model][column] = "DIFFERS"
        elif report.skipped and isinstance(report.longrepr, tuple):
            self.cells[model][column] = "-"
            self.notes[model].add(f"{column}: {report.longrepr[2].removeprefix('Skipped: ')}")
        elif report.when == "call":
            self.cells[model][column] = "equal"

    def text(self) -> str:
        """As Markdown, in the order of the zoo."""
        lines = [
            "| model | prefilled | " + " | ".join(COLUMNS) + " |",
            "|---" * (len(COLUMNS) + 2) + "|",
        ]
        for name in (name for name in ZOO if name in self.cells):
            where = f"locally ({ZOO[name].local})" if ZOO[name].local else "remotely"
            cells = [self.cells[name].get(column, "") for column in COLUMNS]
            lines.append("| " + " | ".join([name, where, *cells]) + " |")
        lines += ["", *(f"- {name}, {note}." for name in ZOO for note in sorted(self.notes[name]))]
        return "\n".join(lines).rstrip() + "\n"


def main(args: list[str]) -> int:
    table = Table()
    code = pytest.main(
        [TESTS, "-m", "engine", *(a for a in args if a != "--save")], plugins=[table]
    )
    text = table.text()
    print(text)
    if "--save" in args:
        commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
        page = f"# The zoo: answers of a cluster, and of one engine\n\n{MEANINGS}\n{text}"
        (RESULTS / "zoo.md").write_text(f"{page}\nCommit {commit}.\n")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
