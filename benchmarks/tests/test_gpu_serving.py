"""The rows that `make bench-gpu` makes of its windows with streams."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_gpu, gpu_serving
from benchmarks.gpu_serving import rows_of, shape_of_8b
from benchmarks.live import BenchError
from benchmarks.serving import model
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


def test_rows() -> None:
    rows = {row.metric: row for row in rows_of(windows())}
    assert rows["ITL p99 of 16 streams, remote"].ratio == pytest.approx(2.0)
    copies = rows["ITL p99 of 16 streams, copies"]
    assert (copies.ratio, copies.target, copies.ok) == (pytest.approx(1.05), "ratio <= 1.1", True)
    assert rows["KV copy as a share of the prefill"].value == pytest.approx(0.02)
    assert rows["TTFT of 8000 tokens, remote"].peer_value == pytest.approx(500)
    assert all(row.ok for row in rows.values())


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


def test_the_shape_has_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tmp_path / "small"
    small.mkdir()
    for name in ("tokenizer.json", "model.safetensors", "config.json"):
        (small / name).write_text("{}")
    monkeypatch.setattr(model, "model_directory", lambda: small)
    made = shape_of_8b(tmp_path)
    assert sorted(path.name for path in made.iterdir()) == ["config.json", "tokenizer.json"]
    config = json.loads((made / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (4096, 32)


def test_serving_is_a_part_of_the_gpu_benchmark() -> None:
    from benchmarks.bench_gpu import PARTS

    assert {"copies", "serving", "slices"} <= set(PARTS)
    assert set(gpu_serving.LONGS) <= set(gpu_serving.WINDOWS)


def test_engines_are_started_only_when_asked_for() -> None:
    """A run of minutes that ends early prints nothing, so the quick parts can run alone."""
    assert "serving" not in bench_gpu.options_of([]).parts
    assert "serving" in bench_gpu.options_of(["--parts", "all"]).parts
    assert bench_gpu.options_of(["--parts", "copies"]).parts == ["copies"]


def test_the_payload_target_is_for_long_runs_in_large_batches() -> None:
    """Short runs: the CPU takes longer to plan them than the GPU may take to copy them."""
    targets = {page >> 10: bench_gpu.payload_target(1 << 30, page) for page in bench_gpu.PAGES}
    assert targets == {4: None, 16: None, 32: None, 64: None, 256: 1000.0, 1024: 1000.0}
    assert bench_gpu.payload_target(1 << 29, 1 << 20) is None


def test_each_card_has_result_files_of_its_own() -> None:
    assert bench_gpu.results_of("NVIDIA H200") == "gpu-h200"
    assert bench_gpu.results_of("NVIDIA H200", peer=True) == "gpu-h200-peer"
    assert bench_gpu.results_of("NVIDIA H100 80GB HBM3") == "gpu-h100-80gb-hbm3"
