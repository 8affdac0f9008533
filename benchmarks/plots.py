"""Charts as SVG, drawn by matplotlib. The import takes a while, so it waits for the first chart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from itertools import cycle
from typing import Any

COLOURS = (
    "#2a7f62", "#b3423a", "#3a6ea5", "#c98a1b", "#7b4fa3", "#4d9db5", "#8c564b", "#7a8794",
    "#d16ba5", "#5a7d2a", "#000000", "#e07b39",
)  # fmt: skip
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
