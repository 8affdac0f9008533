"""The rows that `make bench-gpu` makes of its windows with streams."""

from __future__ import annotations

import pytest

from benchmarks.gpu_serving import rows_of
from benchmarks.live import BenchError
from benchmarks.serving.contract import Answer, Ask, Kind
from benchmarks.serving.load import Result
from benchmarks.serving.meter import Use
from benchmarks.serving.window import Window


def window(label: str, itl: float, late: float = 0.0, path: str = "", write: float = 8.0) -> Window:
    """A hundred tokens of one stream, and a long prompt whose first token comes after `late`."""
    times = [itl * n for n in range(1, 101)]
    answers = [Answer(Ask(Kind.SHORT, (1,), 100, "s"), 0.0, 0.0, times, request_id="s")]
    if late:
        long = Ask(Kind.LONG, (1,) * 8000, 1, "l")
        answers.append(Answer(long, 0.0, 0.0, [late], request_id="l"))
    made = Window("gpu", "gpu", label, 1, None, Result(answers, 100.0, 1.0), Use(1.0))
    made.explained["l"] = {"path": path, "timings_ms": {"prefill": 400.0, "kv_write": write}}
    return made


def windows() -> dict[str, Window]:
    return {
        "alone": window("alone", 0.010),
        "copies": window("copies", 0.0105),
        "local": window("local", 0.030, 0.5, "local"),
        "remote": window("remote", 0.020, 0.6, "remote"),
    }


def test_targets_that_are_missed() -> None:
    found = windows() | {
        "copies": window("copies", 0.0115),
        "remote": window("remote", 0.020, 0.6, "remote", write=9.0),
    }
    missed = [row.metric for row in rows_of(found) if not row.ok]
    assert missed == ["ITL p99 of 16 streams, copies", "KV copy as a share of the prefill"]


def test_prompts_that_took_another_path_are_no_figures() -> None:
    found = windows() | {"remote": window("remote", 0.020, 0.6, "local")}
    with pytest.raises(BenchError, match="remote window"):
        list(rows_of(found))
    found = windows()
    found["local"].answers[0].error = "500"
    with pytest.raises(BenchError, match="1 answers failed: 500"):
        list(rows_of(found))
