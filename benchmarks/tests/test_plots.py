"""Charts show what they are given."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from benchmarks.plots import Axis, curves

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> set[str]:
    return {t.text or "" for t in ET.fromstring(svg).iter(f"{SVG}text")}


def test_curves_have_a_legend_and_end_at_the_axes() -> None:
    lines = {"one <1>": [(1.0, 1.0), (2.0, 900.0)], "two": [(1.5, 5.0)]}
    x, y = Axis("requests/s", 0.0, 2.0), Axis("ms", 1.0, 100.0, log=True)
    for dots in (False, True):
        assert {"one <1>", "two", "Title", "requests/s", "ms"} <= texts(
            curves(lines, "Title", x, y, dots=dots)
        )
    assert (y.cut(0.1), y.cut(7.0), y.cut(900.0)) == (1.0, 7.0, 100.0)


def test_dots_at_one_place_are_drawn_once() -> None:
    x, y = Axis("s", 0.0, 10.0), Axis("ms", 0.0, 10.0)
    one = curves({"a": [(1.0, 1.0)]}, "t", x, y, dots=True)
    many = curves({"a": [(1.0, 1.0 + n / 1e6) for n in range(1000)]}, "t", x, y, dots=True)
    assert len(many) < len(one) + 200
