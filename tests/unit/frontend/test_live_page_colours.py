"""Colour-blind people can tell the colours of the live page apart, in both schemes."""

from __future__ import annotations

import math
import re
from itertools import combinations

import pytest

from pullfill.frontend.live.page import FILES

NAMES = {"blue", "sky", "green", "orange", "red", "purple", "grey"}
LEAST = 9.0
"""Distance in CIE Lab. About 2.3 is just noticeable."""
SEEN_AS = {
    "everybody": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
                   (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
                     (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602),
                   (0.004733, 0.691367, 0.303900)),
}  # fmt: skip
"""Linear RGB → linear RGB, from Machado, Oliveira and Fernandes, 2009."""
XYZ = (
    (0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8727),
)  # fmt: skip
"""Of linear sRGB, each row over its white."""
Vector = tuple[float, float, float]


def times(matrix: tuple[Vector, ...], v: Vector) -> Vector:
    a, b, c = (sum(m * x for m, x in zip(row, v, strict=True)) for row in matrix)
    return a, b, c


def linear(colour: str) -> Vector:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return r, g, b


def lab(rgb: Vector) -> Vector:
    clipped = (min(1.0, max(0.0, part)) for part in rgb)
    r, g, b = clipped
    x, y, z = (
        math.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in times(XYZ, (r, g, b))
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("who", SEEN_AS)
def test_any_two_colours_differ(scheme: int, who: str) -> None:
    css = (FILES / "style.css").read_text()
    root = re.findall(r":root \{(.*?)\}", css, re.S)[scheme]
    colours = {n: c for n, c in re.findall(r"--(\w+): (#\w{6});", root) if n in NAMES}
    assert set(colours) == NAMES
    seen = {name: lab(times(SEEN_AS[who], linear(c))) for name, c in colours.items()}
    near = {(a, b): math.dist(seen[a], seen[b]) for a, b in combinations(sorted(seen), 2)}
    assert {pair: d for pair, d in near.items() if d < LEAST} == {}
