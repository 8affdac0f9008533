"""Charts as SVG, drawn by matplotlib. The import takes a while, so it waits for the first chart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from itertools import cycle
from typing import Any

from benchmarks.report import Row

COLOURS = (
    "#2a7f62", "#b3423a", "#3a6ea5", "#c98a1b", "#7b4fa3", "#4d9db5", "#8c564b", "#7a8794",
    "#d16ba5", "#5a7d2a", "#000000", "#e07b39",
)  # fmt: skip
_GOOD, _BAD, _PLAIN = "#2a7f62", "#b3423a", "#7a8794"
_MOST = 3.5
_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "pullfill", "axes.grid": True,
          "grid.color": "#dddddd", "axes.axisbelow": True, "font.size": 9.0}  # fmt: skip

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """Linear or logarithmic from low to high."""

    name: str
    low: float
    high: float
    log: bool = False

    def cut(self, value: float) -> float:
        """Return the value, or the end of the axis that it lies beyond."""
        return min(max(value, self.low), self.high)


@contextmanager
def _chart(out: StringIO, width: float, height: float, title: str) -> Iterator[Any]:
    """Yield the axes of a chart. Afterwards its SVG is in `out`. Sizes in inches."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        axes.set_title(title, loc="left")
        yield axes
        # No date: the same rows give the same file.
        figure.savefig(out, format="svg", metadata={"Date": None})


def curves(
    lines: Mapping[str, Sequence[Point]], title: str, x: Axis, y: Axis, *, dots: bool = False
) -> str:
    """Return one line (or cloud of dots) per name, with a legend."""
    out = StringIO()
    with _chart(out, 9.0, max(3.8, 0.2 * len(lines) + 0.8), title) as axes:
        for colour, (name, points) in zip(cycle(COLOURS), lines.items(), strict=False):
            placed = [(x.cut(a), y.cut(b)) for a, b in points]
            if dots:  # one for each place that can be told apart
                placed = list({(f"{a:.3g}", f"{b:.2g}"): (a, b) for a, b in placed}.values())
            form = {"marker": ".", "linestyle": "none", "markersize": 3.0} if dots else {}
            axes.plot(*zip(*placed, strict=True), color=colour, label=name, linewidth=1.4, **form)
        for axis, which in ((x, "x"), (y, "y")):
            scale = "log" if axis.log else "linear"
            axes.set(**{f"{which}label": axis.name, f"{which}scale": scale,
                        f"{which}lim": (axis.low, axis.high)})  # fmt: skip
        axes.figure.legend(loc="outside right upper", frameon=False)
    return out.getvalue()


def bars(rows: Sequence[Row], title: str) -> str:
    """Return one bar per row that has a ratio, in order, with a black mark where its target is.

    Bars longer than the chart is wide are cut. Their number says how long they are."""
    shown = [(row, row.ratio) for row in rows if row.ratio is not None]
    out = StringIO()
    with _chart(out, 10.0, 0.22 * len(shown) + 0.8, f"{title}: value / peer") as axes:
        for at, (row, ratio) in enumerate(shown):
            colour = _PLAIN if not row.target else _GOOD if row.ok else _BAD
            axes.barh(at, min(ratio, _MOST), height=0.7, color=colour)
            axes.text(min(ratio, _MOST) + 0.04, at, f"{ratio:g}", va="center")
            if row.target:
                place = min(float(row.target.split()[-1]), _MOST)
                axes.plot([place, place], [at - 0.45, at + 0.45], color="black", linewidth=2)
        labels = [f"{row.metric} / {row.peer}" for row, _ in shown]
        axes.set_yticks(range(len(shown)), labels=labels)
        axes.set(xlim=(0, _MOST + 0.5), ylim=(len(shown) - 0.5, -0.5))
        axes.grid(visible=False, axis="y")
    return out.getvalue()
