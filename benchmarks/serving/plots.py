"""Curves as SVG, drawn by hand like the bars of `bench_transfer_plot`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.serving import stats
from benchmarks.serving.campaign import Measured
from benchmarks.serving.contract import Kind
from benchmarks.serving.parts import CONTROL, LONGS
from benchmarks.serving.stats import Slo
from benchmarks.serving.tables import rate_points

COLOURS = (
    "#2a7f62", "#b3423a", "#3a6ea5", "#c98a1b", "#7b4fa3", "#4d9db5", "#8c564b", "#7a8794",
    "#d16ba5", "#5a7d2a", "#000000", "#e07b39",
)  # fmt: skip
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 900, 380, 70, 40, 210, 50

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """Linear or logarithmic from low to high."""

    name: str
    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """0 at low, 1 at high; what lies beyond is cut."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            return [10.0**n for n in range(first, last + 1)]
        rough = (self.high - self.low) / 6
        size = 10 ** math.floor(math.log10(rough))
        step = min((m * size for m in (1, 2, 5, 10)), key=lambda s: abs(s - rough))
        count = int((self.high - self.low) / step + 1e-9)
        return [self.low + step * n for n in range(count + 1)]


def curves(
    lines: Mapping[str, Sequence[Point]], title: str, x: Axis, y: Axis, *, dots: bool = False
) -> str:
    """One line (or cloud of dots) per name, with a legend."""
    height = max(_HEIGHT, _TOP + 18 * len(lines) + 20)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20" font-size="15">{escape(title)}</text>',
        *_grid(x, y),
    ]
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        placed = [(_x(x, a), _y(y, b)) for a, b in points]
        if dots:
            spots = dict.fromkeys((round(a), round(b)) for a, b in placed)  # one for each pixel
            path = "".join(f"M{a} {b}h0" for a, b in spots)
            parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2.8" '
                         'stroke-linecap="round"/>')  # fmt: skip
        else:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in placed)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" '
                         'stroke-width="1.6"/>')  # fmt: skip
        at = _TOP + 18 * number
        parts.append(
            f'<rect x="{_WIDTH - _RIGHT + 15}" y="{at}" width="12" height="12" fill="{colour}"/>'
            f'<text x="{_WIDTH - _RIGHT + 33}" y="{at + 10}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _grid(x: Axis, y: Axis) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for tick in x.ticks():
        at = _x(x, tick)
        parts.append(
            f'<line x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{bottom}" stroke="#dddddd"/>'
            f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>'
        )
    for tick in y.ticks():
        at = _y(y, tick)
        parts.append(
            f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}" stroke="#dddddd"/>'
            f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    middle = (_LEFT + right) / 2
    return [
        *parts,
        f'<text x="{middle}" y="{bottom + 36}" text-anchor="middle">{escape(x.name)}</text>',
        f'<text x="10" y="{_TOP - 6}">{escape(y.name)}</text>',
    ]


def _x(axis: Axis, value: float) -> float:
    return _LEFT + (_WIDTH - _RIGHT - _LEFT) * axis.share(value)


def _y(axis: Axis, value: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * axis.share(value)


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
