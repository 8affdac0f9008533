"""The arithmetic of bench_paths, on windows made by hand."""

from __future__ import annotations

from benchmarks import bench_paths


def test_remote_may_cost_a_little_and_the_copying() -> None:
    def missed(less: float, copy_ms: float) -> list[str]:
        """Of five pairs one is far off, and each comes slower than the one before."""
        at = [100.0 + 40.0 * number for number in range(5)]
        pairs = [bench_paths.Pair(ms, ms + less, prefill=ms - 3.0, hops=4.0) for ms in at[:4]]
        pairs.append(bench_paths.Pair(at[4], at[4] + 90.0, prefill=at[4], hops=4.0))
        return [r.metric for r in bench_paths.length_rows({256: pairs}, {256: copy_ms}) if not r.ok]

    assert missed(15.9, 1.0) == [], "the median of the pairs counts"
    assert missed(17.0, 2.5) == []
    assert missed(17.0, 1.5) == ["TTFT of 256, remote less local"]
