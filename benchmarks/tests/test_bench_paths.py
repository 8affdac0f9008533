"""The arithmetic of bench_paths, on windows made by hand."""

from __future__ import annotations

import pytest

from benchmarks import bench_paths
from benchmarks.bench_paths import Heard, Window
from benchmarks.serving import model


def window(gap_s: float, ttft_s: float | None = None) -> Window:
    """One stream with a token every `gap_s` for two seconds, and a long prompt if there is one."""
    at = [10.0 + gap_s * number for number in range(1, 1 + round(2.0 / gap_s))]
    long = [] if ttft_s is None else [Heard("l", 10.5, [10.5 + ttft_s])]
    return Window(1.0, [Heard("s", 10.0, at)], long)


def test_tokens_count_inside_the_window_only() -> None:
    assert window(0.1).tokens_per_s == pytest.approx(10.0)
    assert window(0.1, 0.3).tokens_per_s == pytest.approx(11.0), "those of long prompts too"
    assert window(0.1, 0.8).tokens_per_s == pytest.approx(10.0), "it came after the end"
    assert window(0.1).gaps_ms == pytest.approx([100.0] * 19)


@pytest.mark.parametrize(
    ("gap_s", "ttft_s", "missed"),
    [
        (0.1, 1.1, set()),
        (0.2, 1.1, {"ITL p99 with long prompts"}),
        (0.1, 1.3, {"long TTFT p50"}),
    ],
)
def test_targets(gap_s: float, ttft_s: float, missed: set[str]) -> None:
    rows = bench_paths.token_rows([window(0.1)], [window(gap_s, ttft_s)], alone_ms=1000.0)
    assert {r.metric for r in rows if not r.ok} == missed


def copies(ms: float) -> dict[int, float]:
    """Every copy takes so long."""
    each = model.kv_bytes_per_token()
    return {length * each: ms for length in bench_paths.LENGTHS}


def test_remote_may_cost_a_little_and_the_copying() -> None:
    def pairs(less: float, drift: float = 0.0) -> dict[int, list[bench_paths.Pair]]:
        """Of five pairs one is far off; each comes `drift` slower than the one before."""
        at = [100.0 + drift * number for number in range(5)]
        each = [bench_paths.Pair(ms, ms + less, prefill=ms - 3.0, hops=4.0) for ms in at[:4]]
        each.append(bench_paths.Pair(at[4], at[4] + 90.0, prefill=at[4], hops=4.0))
        return dict.fromkeys(bench_paths.LENGTHS, each)

    assert all(r.ok for r in bench_paths.length_rows(pairs(0.0), copies(1.0))), "the median counts"
    rows = bench_paths.length_rows(pairs(14.0, drift=40.0), copies(1.0))
    assert all(r.ok for r in rows), "of the pairs"
    assert all(r.ok for r in bench_paths.length_rows(pairs(17.0), copies(2.5)))
    rows = [r for r in bench_paths.length_rows(pairs(17.0), copies(1.5)) if r.target]
    assert [r.ok for r in rows] == [False] * len(bench_paths.LENGTHS)
    assert rows[0].unit == "ms, half of 5 pairs within 17 ... 17"


def test_the_parts_of_what_remote_costs_add_up() -> None:
    pair = bench_paths.Pair(local=100.0, remote=117.0, prefill=97.0, hops=4.0)
    found = {length: [pair] for length in bench_paths.LENGTHS}
    rows = {r.metric: r.value for r in bench_paths.length_rows(found, copies(1.0))}
    parts = [value for metric, value in rows.items() if metric.startswith("TTFT of 256, of it")]
    assert parts == [4.0, 16.0, -3.0]
    assert rows["TTFT of 256, remote less local"] == 17.0


def test_bursts_tell_the_first_and_the_mean() -> None:
    first, mean = bench_paths.burst_rows([[1.0, 2.0, 3.0], [1.2, 2.0, 4.0]])
    assert (first.value, mean.value) == (1.1, 2.2)
