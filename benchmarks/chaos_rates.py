"""Numbers out of what clients saw: rates, recovery, the slope of a curve. Pure.

Times are seconds on one clock. A rate is counted over the second that *follows* a moment: a window
that ended there would still contain what came before the fault.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

WINDOW_S = 1.0
STEP_S = 0.05
BACK = 0.8
"""Share of a rate that counts as having it back."""


def rate_at(times: Sequence[float], begin: float, width: float = WINDOW_S) -> float:
    """Events per second in [begin, begin + width). `times` ascending."""
    return (bisect_left(times, begin + width) - bisect_left(times, begin)) / width


def rates(times: Sequence[float], begin: float, end: float) -> list[float]:
    """Of every whole window between the two, side by side; [] when there is none."""
    count = int((end - begin) / WINDOW_S + 1e-9)
    return [rate_at(times, begin + i * WINDOW_S) for i in range(count)]


def back_after(
    times: Sequence[float], moment: float, wanted: float, end: float, share: float = BACK
) -> float | None:
    """Seconds from `moment` to the first window with at least `share` of the rate `wanted`; 0 when
    the second right after it already has it. None when no whole window before `end` has."""
    step = 0
    while (begin := moment + step * STEP_S) + WINDOW_S <= end:
        if rate_at(times, begin) >= share * wanted:
            return begin - moment
        step += 1
    return None


def longest_gap(times: Sequence[float], begin: float, end: float) -> float:
    """The longest stretch between the two without an event, in seconds."""
    inside = [begin, *(t for t in times if begin < t < end), end]
    return max(b - a for a, b in pairwise(inside))


@dataclass(frozen=True, slots=True)
class Slope:
    """Of a straight line through points. error: its standard error, same unit."""

    per_minute: float
    error: float

    def within_noise(self, floor: float = 0.0) -> bool:
        """Whether nothing may grow: at most two standard errors, or `floor`, above zero."""
        return self.per_minute <= max(2 * self.error, floor)


def slope(
    times: Sequence[float],
    values: Sequence[float],
    bins: int = 20,
    of: Callable[[Iterable[float]], float] = fmean,
) -> Slope:
    """Least squares over `bins` equal stretches of time, `of` the samples in each. Samples that
    follow each other closely tell nearly the same; over stretches the residuals are honest about
    how sure the slope is. Raises ValueError with fewer than three stretches."""
    begin, end = times[0], times[-1]
    width = (end - begin) / bins or 1.0
    groups: dict[int, list[int]] = {}
    for index, at in enumerate(times):
        groups.setdefault(min(int((at - begin) / width), bins - 1), []).append(index)
    xs = [fmean(times[i] for i in group) / 60 for group in groups.values()]
    ys = [of(values[i] for i in group) for group in groups.values()]
    if len(xs) < 3:
        raise ValueError("a slope needs at least three points in time")
    x0, y0 = fmean(xs), fmean(ys)
    spread = sum((x - x0) ** 2 for x in xs)
    rise = sum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True)) / spread
    rest = sum((y - y0 - rise * (x - x0)) ** 2 for x, y in zip(xs, ys, strict=True))
    return Slope(rise, math.sqrt(rest / (len(xs) - 2) / spread))
