"""A bar chart of ratios as SVG, drawn by hand: no plotting library is needed to read results."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from benchmarks.report import Row

_WIDTH, _LABEL, _BAR, _LINE, _TOP = 1000, 480, 400, 22, 50
_GOOD, _BAD, _PLAIN = "#2a7f62", "#b3423a", "#7a8794"


def bars(rows: Sequence[Row], title: str) -> str:
    """One bar per row that has a ratio, in order; a black mark where its target is. Longer bars
    than the chart is wide are cut, their number says how long they are."""
    shown = [r for r in rows if r.ratio is not None]
    most = 3.5
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" '
        f'height="{_TOP + _LINE * len(shown) + 30}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20" font-size="15">{escape(title)}: value / peer</text>',
    ]
    for mark in (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0):
        x = _at(mark, most)
        lines.append(
            f'<line x1="{x:g}" y1="{_TOP - 8}" x2="{x:g}" y2="{_TOP + _LINE * len(shown)}" '
            f'stroke="#dddddd"/><text x="{x:g}" y="{_TOP - 12}" text-anchor="middle" '
            f'fill="#555555">{mark:g}</text>'
        )
    for index, r in enumerate(shown):
        lines += _bar(r, _TOP + _LINE * index, most)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _bar(r: Row, y: int, most: float) -> list[str]:
    assert r.ratio is not None
    colour = _PLAIN if not r.target else _GOOD if r.ok else _BAD
    end = _at(min(r.ratio, most), most)
    lines = [
        f'<text x="{_LABEL - 8}" y="{y + 14}" text-anchor="end">'
        f"{escape(r.metric)} / {escape(r.peer)}</text>",
        f'<rect x="{_LABEL}" y="{y + 3}" width="{end - _LABEL:g}" height="{_LINE - 7}" '
        f'fill="{colour}"/>',
        f'<text x="{end + 5:g}" y="{y + 14}">{r.ratio:g}</text>',
    ]
    if r.target:
        x = _at(min(float(r.target.split()[-1]), most), most)
        lines.append(
            f'<line x1="{x:g}" y1="{y + 1}" x2="{x:g}" y2="{y + _LINE - 2}" stroke="black" '
            'stroke-width="2"/>'
        )
    return lines


def _at(value: float, most: float) -> float:
    return _LABEL + _BAR * value / most
