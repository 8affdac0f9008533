"""What `make bench-splits` asks and judges, without a system."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.bench_decode_policy import DEFAULT
from benchmarks.bench_splits import BOTH, TURNS, Figures, loads, predictions, rows_of
from benchmarks.serving import workloads
from benchmarks.serving.load import Result
from benchmarks.serving.meter import Use
from benchmarks.serving.window import Window

VOCABULARY = range(100, 9000)


def options(**more: object) -> argparse.Namespace:
    told = {
        "trace": None, "speeds": [2.0], "requests": 2, "seconds": 9.0, "clients": 3,
        "paced": [1.0, 2.0], "rates": [2.0], "change": [4.0, 2.0], "loads": ["trace", "1K/200"],
    }  # fmt: skip
    return argparse.Namespace(**{**told, **more})


class TestTrace:
    def test_equal_blocks_are_equal_tokens_for_one_seed_only(self, tmp_path: Path) -> None:
        trace = tmp_path / "trace"
        line = {"timestamp": 500, "input_length": 40, "output_length": 0, "hash_ids": [7, 8]}
        lines = [line, {**line, "timestamp": 2500, "hash_ids": [7, 9]}]
        trace.write_text("".join(json.dumps(one) + "\n" for one in lines))
        first, second = workloads.trace(trace, 4.0, VOCABULARY, "seed")
        other, _ = workloads.trace(trace, 4.0, VOCABULARY, "another seed")
        assert [(a.at_s, len(a.prompt), a.max_tokens) for a in (first, second)] == [
            (0.0, 40, 1), (0.5, 40, 1)
        ]  # fmt: skip
        assert first.prompt[:16] == second.prompt[:16] != other.prompt[:16]
        assert first.prompt[16:32] != second.prompt[16:32]
        assert first.prompt[32:] != second.prompt[32:], "what no block names is nobody else's"

    def test_the_default_trace_can_be_asked(self) -> None:
        asks = workloads.trace(DEFAULT, 4.0, VOCABULARY)
        assert len(asks) == 453
        assert all(ask.prompt and ask.max_tokens for ask in asks)


class TestLoads:
    def test_rounds_and_speeds_share_no_prompt_but_systems_do(self) -> None:
        told = options(trace=DEFAULT, speeds=[2.0, 4.0])
        first, again, later = (loads(told, VOCABULARY, number) for number in (0, 0, 1))
        assert first == again
        assert list(first) == ["trace 2x", "trace 4x", "1K/200"]
        prompts = [a.prompt for each in (first, later) for w in each.values() for a in w.asks]
        assert len(set(prompts)) == len(prompts)
        assert len(first["trace 2x"].asks) == 2
        clients = {a.lane: a.max_tokens for a in first["1K/200"].asks if a.at_s is not None}
        assert clients == {"client-0": 66, "client-1": 133, "client-2": 200}

    def test_without_a_trace_the_others_are_measured(self) -> None:
        assert list(loads(options(), VOCABULARY, 0)) == ["1K/200"]

    def test_paced_requests_come_at_random_times_as_often_as_asked(self) -> None:
        found = loads(options(loads=["paced", "rates"], seconds=40.0), VOCABULARY, 0)
        assert {k: len(w.asks) for k, w in found.items()} == {
            "1K/1K paced": 80, "1K/200 paced": 80, "rates 2/s": 80
        }  # fmt: skip
        times = [a.at_s or 0.0 for a in found["1K/200 paced"].asks]
        assert times == sorted(times)
        assert 0 <= times[0] < times[-1] < 40
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert statistics.stdev(gaps) > 0.6 * statistics.mean(gaps), "not in step"
        assert len({a.lane for a in found["rates 2/s"].asks}) == 80, "nobody waits for another"
        shapes = Counter((len(a.prompt), a.max_tokens) for a in found["rates 2/s"].asks)
        assert set(shapes) == {(32, 64), (2048, 4)}
        assert 10 <= shapes[2048, 4] <= 30

    def test_midway_long_prompts_become_long_answers(self) -> None:
        work = loads(options(loads=["change"], seconds=10.0), VOCABULARY, 0)["change"]
        early = [a for a in work.asks if (a.at_s or 0.0) < 5]
        late = [a for a in work.asks if (a.at_s or 0.0) >= 5]
        assert (len(early), len(late)) == (20, 10)
        assert all(len(a.prompt) > 10 * a.max_tokens for a in early)
        assert all(a.max_tokens > 10 * len(a.prompt) for a in late)


class TestRows:
    def test_in_the_changing_load_equal_is_not_better(self) -> None:
        both = Figures(10, 0, 0.96, 50, 200, 24, 101)
        turns, dead = both._replace(tokens_s=100), both._replace(good=0.0, tokens_s=0.0)
        rows = rows_of({"change": {BOTH: both, TURNS: turns, "1p1d-cost": turns, "1-vllm": dead}})
        assert [(r.metric, r.peer, r.ok) for r in rows] == [
            ("change: good", TURNS, False),
            ("change: tokens", TURNS, True),
            ("change: good", "1p1d-cost", False),
            ("change: tokens", "1p1d-cost", True),
        ]

    def test_the_best_of_the_others_is_the_peer(self) -> None:
        both = Figures(10, 0, 0.96, 50, 200, 24, 96)
        turns = Figures(10, 0, 0.80, 50, 190, 90, 100)
        rows = rows_of(
            {
                "trace 4x": {BOTH: both, "2-decode": both._replace(good=0.97), TURNS: turns},
                "1K/1K": {BOTH: both, TURNS: turns},
                "longs": {BOTH: both._replace(good=0.1), TURNS: turns._replace(good=0.0)},
                "1K/200": {TURNS: turns},
            }
        )
        assert [(r.metric, r.peer, r.ok) for r in rows] == [
            ("trace 4x: good", "2-decode", False),
            ("trace 4x: good", "", True),
            ("trace 4x: ITL p99", "", True),
            ("trace 4x: TTFT p90", TURNS, False),
            ("1K/1K: good", TURNS, True),
            ("1K/1K: tokens", TURNS, False),
            ("longs: tokens", TURNS, False),
        ]

    def test_a_system_that_answers_nothing_misses_and_nobody_beats_it_by_a_ratio(self) -> None:
        nan = float("nan")
        dead = Figures(10, 10, 0.0, nan, nan, nan, 0.0)
        alive = Figures(10, 0, 0.99, 50, 200, 24, 96)
        missed = rows_of({"trace 2x": {BOTH: dead, TURNS: alive}})
        assert [r.ok for r in missed] == [False] * 4
        assert rows_of({"1K/1K": {BOTH: alive, TURNS: dead}}) == []


def told(path: str, predicted: float, was: float | None, choice: str = "") -> dict[str, Any]:
    other = 7 * predicted
    both = {"local": predicted, "remote": other} if path == "local" else {"remote": predicted}
    return {
        "path": path, "choice": choice or path, "predicted_ms": both, "outcome_ms": was
    }  # fmt: skip


class TestPredictions:
    def test_each_place_has_rows_of_its_own(self) -> None:
        records = [
            told("local", 110.0, 100.0),
            told("local", 84.0, 100.0),
            told("remote", 200.0, 100.0),
            # Chosen, and taken back: what was predicted is not what happened.
            told("local", 1.0, 100.0, choice="remote"),
            told("local", 1.0, None),
            {"path": "local", "choice": None, "predicted_ms": None, "outcome_ms": None},
        ]
        rows = list(predictions([self.window(BOTH, records), self.window(TURNS, [])]))
        assert [(r.metric, r.value, r.ok) for r in rows] == [
            ("prompts computed here: error of 2 predictions, median", 13.0, True),
            ("prompts computed here: error of 2 predictions, p90", 15.4, True),
            ("prompts computed at another worker: error of 1 predictions, median", 100.0, False),
            ("prompts computed at another worker: error of 1 predictions, p90", 100.0, False),
        ]

    def test_without_predictions_of_a_place_the_row_says_so(self) -> None:
        rows = list(predictions([self.window(BOTH, [])]))
        assert [r.value for r in rows] == [None, None]
        assert list(predictions([self.window(TURNS, [])])) == []

    @staticmethod
    def window(system: str, records: list[dict[str, Any]]) -> Window:
        explained = {str(number): record for number, record in enumerate(records)}
        result, use = Result([], 1.0, 0.0), Use(1.0, {})
        return Window(system, "splits", "change", 0, 1.0, result, use, explained=explained)
