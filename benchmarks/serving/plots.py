"""Charts of a campaign: time between tokens, and goodput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.plots import Axis, Point, curves
from benchmarks.serving import stats
from benchmarks.serving.campaign import Measured
from benchmarks.serving.contract import Kind
from benchmarks.serving.parts import CONTROL, LONGS
from benchmarks.serving.stats import Slo
from benchmarks.serving.tables import rate_points


def cdf(values: Sequence[float], points: int = 200) -> list[Point]:
    """(value, share of values that are not above it), thinned out."""
    ordered = sorted(values)
    if not ordered:
        return []
    places = {round(n * (len(ordered) - 1) / (points - 1)) for n in range(points)}
    # The tail is what is looked at: its last values are all kept.
    places |= set(range(max(0, len(ordered) - points // 2), len(ordered)))
    return [(ordered[n], (n + 1) / len(ordered)) for n in sorted(places)]


def draw(measured: Measured, slo: Slo, prefix: str = "serving") -> dict[str, str]:
    """File name → picture, of everything that was measured."""
    names = [s.name for s in measured.systems]
    pictures = {}
    for label, file in ((LONGS, "itl-cdf"), (CONTROL, "itl-cdf-control")):
        if pooled := {n: _gaps_ms(measured, n, label) for n in names if measured.of(
            n, "interference", label
        )}:  # fmt: skip
            what = "with long prompts" if label == LONGS else "without long prompts"
            pictures[file] = _cdf_picture(pooled, what)
    if over := _over_time(measured, names):
        pictures["itl-time"] = over
    goodput = {n: [(r, g) for r, g, _ in rate_points(measured, n, slo)] for n in names}
    if goodput := {n: points for n, points in goodput.items() if points}:
        pictures["goodput"] = _goodput_picture(goodput, slo)
    return {f"{prefix}-{name}.svg": picture for name, picture in pictures.items()}


def _gaps_ms(measured: Measured, system: str, label: str) -> list[float]:
    return [1e3 * g for w in measured.of(system, "interference", label) for g in w.gaps()]


def _cdf_picture(pooled: Mapping[str, Sequence[float]], what: str) -> str:
    lines = {name: [(v, 1 - share + 1e-4) for v, share in cdf(values)]
             for name, values in pooled.items()}  # fmt: skip
    most = max((v for values in pooled.values() for v in values), default=100.0)
    x = Axis("ITL, ms", 1.0, max(100.0, most), log=True)
    y = Axis("share of gaps that are longer", 1e-4, 1.0, log=True)
    return curves(lines, f"Inter-token latency of the short streams {what}", x, y)


def _over_time(measured: Measured, names: Sequence[str]) -> str:
    """The first window with longs of each system."""
    lines, last, most = {}, 0.0, 100.0
    for name in names:
        for window in measured.of(name, "interference", LONGS)[:1]:
            short = [a for a in window.answers if a.ask.kind is Kind.SHORT]
            points = [(t, 1e3 * g) for t, g in stats.timed_gaps(short, window.length_s)]
            if points:
                lines[name] = points
                last = max(last, window.length_s)
                most = max(most, *(g for _, g in points))
    if not lines:
        return ""
    x, y = Axis("s", 0.0, last), Axis("ITL, ms", 1.0, most, log=True)
    title = "Inter-token latency over time, with long prompts"
    return curves(lines, title, x, y, dots=True)


def _goodput_picture(points: Mapping[str, Sequence[Point]], slo: Slo) -> str:
    most = max(rate for line in points.values() for rate, _ in line)
    title = f"Goodput: TTFT <= {1e3 * slo.ttft_s:g} ms, ITL p99 <= {1e3 * slo.itl_s:g} ms"
    x, y = Axis("requests/s", 0.0, most), Axis("good requests/s", 0.0, most)
    return curves(points, title, x, y)
