"""`make zoo`: serve each model of the zoo, compare its answers with one engine's, print a table.

`--save` writes the rows to benchmarks/results/zoo.md. Rows of models that were not served now stay.
Other arguments go to pytest, as `-k Gemma`. Exit status: pytest's.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict

import pytest

from benchmarks.report import RESULTS
from tests.support.zoo import ZOO

TESTS = "tests/integration/test_models.py"
COLUMNS = ("cold", "chunked", "hit", "lora", "cancelled", "killed", "tp2", "spec")
HEAD = ("model", "prefilled", *COLUMNS, "commit")
PAGE = RESULTS / "zoo.md"
MEANINGS = """\
# The zoo: answers of a cluster, and of one engine

One cluster per row; random weights. `equal`: tokens and log probabilities are those of one plain
vLLM engine (with a LoRA adapter: those of a local prefill). 16 bits (Qwen3-Next) round by the
tokens at which steps end. Cold and killed, the engine computes in the same steps. In the other
columns of such a row, more than half of the answers have the engine's tokens, and the log
probabilities of all differ by at most 0.1 up to the first other token. cold: no prefix is cached.
chunked: prompts longer than a step. hit: a prefix on either side, or on both. cancelled: the client
goes away. killed: the prefill worker dies in the middle. tp2: the worker that prefills has two
ranks (tensor parallelism). spec: both workers and the plain engine speculate by n-grams. `-`: see
the notes. All prompts are prefilled remotely, except where the notes say otherwise.
"""


class Table:
    """A pytest plugin that remembers how each test of the zoo ended."""

    def __init__(self) -> None:
        self.cells: dict[str, dict[str, str]] = defaultdict(dict)
        self.notes: dict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        column, _, model = report.nodeid.partition("::test_")[2].rstrip("]").partition("[")
        if report.failed:
            self.cells[model][column] = "DIFFERS" if report.when == "call" else "FAILED"
        elif report.skipped and isinstance(report.longrepr, tuple):
            self.cells[model][column] = "-"
            self.notes[model].add(f"{column}: {report.longrepr[2].removeprefix('Skipped: ')}")
        elif report.when == "call":
            self.cells[model][column] = "equal"

    def lines(self, name: str, commit: str) -> list[str]:
        """The row of a model as Markdown, then its notes. They begin as `lines_of` expects."""
        model, notes = ZOO[name], sorted(self.notes[name])
        if f"{name}, prefix cache" in ZOO:
            notes.append("hit: served without a prefix cache, so nothing is hit")
        elif not model.caches:
            notes.append("hit: vLLM's CPU build has no prefix cache for it, so nothing is hit")
        if not model.chunks:
            notes.append("chunked: vLLM's CPU build computes each prompt in one step")
        if model.local_with_flags:
            columns = "tp2" if model.speculation else "tp2 and spec"
            reason = model.local_with_flags
            notes.append(f"{columns}: all workers have the flag and prefill locally ({reason})")
        if model.mocked:
            notes.append(f"what vLLM's CPU build cannot compute: mock engines in {model.mocked}")
        cells = [self.cells[name].get(column, "") for column in COLUMNS]
        return [_row(name, "remotely", *cells, commit), *(f"- {name}: {note}." for note in notes)]


def lines_of(page: str) -> dict[str, list[str]]:
    """Return the lines of each model in a page that `page_of` made."""
    starts = {name: (f"| {name} |", f"- {name}: ") for name in ZOO}
    every = page.splitlines()
    found = {name: [x for x in every if x.startswith(start)] for name, start in starts.items()}
    return {name: lines for name, lines in found.items() if lines}


def page_of(models: dict[str, list[str]]) -> str:
    """Join the lines of the models, in the order of the zoo."""
    rows = [models[name][0] for name in ZOO if name in models]
    notes = [note for name in ZOO if name in models for note in models[name][1:]]
    return "\n".join([_row(*HEAD), "|---" * len(HEAD) + "|", *rows, "", *notes]).rstrip() + "\n"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def main(args: list[str]) -> int:
    table = Table()
    code = pytest.main(
        [TESTS, "-m", "engine", *(a for a in args if a != "--save")], plugins=[table]
    )
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    models = {name: table.lines(name, commit) for name in ZOO if name in table.cells}
    print(page_of(models))
    if "--save" in args:
        saved = lines_of(PAGE.read_text()) if PAGE.exists() else {}
        PAGE.write_text(f"{MEANINGS}\n{page_of(saved | models)}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
