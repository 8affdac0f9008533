"""The table of `make zoo`: what a test's end becomes, and which rows stay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.zoo import Table, lines_of, page_of


def report(test: str, when: str = "call", outcome: str = "passed", why: str = "") -> Any:
    return SimpleNamespace(
        nodeid=f"tests/integration/test_models.py::test_{test}",
        when=when,
        failed=outcome == "failed",
        skipped=outcome == "skipped",
        longrepr=("file", 1, f"Skipped: {why}"),
    )


def test_a_cell_says_how_its_test_ended() -> None:
    table = Table()
    for given in (
        report("cold[DeepSeek-V3]", "setup"),
        report("cold[DeepSeek-V3]"),
        report("hit[DeepSeek-V3]", outcome="failed"),
        report("lora[DeepSeek-V3]", outcome="skipped", why="no Triton"),
        report("killed[DeepSeek-V3]", "setup", "failed"),
    ):
        table.pytest_runtest_logreport(given)
    row, *notes = table.lines("DeepSeek-V3", "abc")
    assert row == "| DeepSeek-V3 | remotely | equal |  | DIFFERS | - |  | FAILED |  |  | abc |"
    assert notes[0] == "- DeepSeek-V3: lora: no Triton."
    assert notes[1].startswith("- DeepSeek-V3: hit: ")


def test_a_row_says_in_which_columns_prompts_stay_local() -> None:
    table = Table()
    for model in ("Falcon-H1 (Mamba-2)", "Qwen3-Next"):
        _, *notes = table.lines(model, "abc")
        said = f"- {model}: tp2: all workers have the flag and prefill locally (kv_groups)."
        assert said in notes
    assert not [note for note in table.lines("Llama", "abc") if "locally" in note]


def test_rows_of_models_that_were_not_served_now_stay() -> None:
    old, new = ({"Llama": ["| Llama | a |"]}, {"Llama, fp8 cache": ["| Llama, fp8 cache | b |"]})
    old["Mistral"] = ["| Mistral | a |", "- Mistral: lora: no."]
    page = page_of(lines_of("Text.\n" + page_of(old)) | new)
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert rows == ["| Llama | a |", "| Llama, fp8 cache | b |", "| Mistral | a |"]
    assert page.endswith("\n- Mistral: lora: no.\n")
