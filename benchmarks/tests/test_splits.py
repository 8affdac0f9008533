"""What `make bench-splits` asks and judges, without a system."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.bench_decode_policy import DEFAULT
from benchmarks.bench_splits import BOTH, TURNS, Figures, loads, rows_of
from benchmarks.serving import workloads

VOCABULARY = range(100, 9000)


def options(**more: object) -> argparse.Namespace:
    told = {"trace": None, "speeds": [2.0], "requests": 2, "seconds": 9.0}
    return argparse.Namespace(**{**told, "clients": 3, "loads": ["trace", "1K/200"], **more})


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
        assert {a.lane for a in first["1K/200"].asks} == {f"client-{n}" for n in range(3)}

    def test_without_a_trace_the_others_are_measured(self) -> None:
        assert list(loads(options(), VOCABULARY, 0)) == ["1K/200"]


class TestRows:
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
