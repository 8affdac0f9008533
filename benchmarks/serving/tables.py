"""The same numbers side by side: one line per system. Rows for the file, tables for readers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.report import Row, median, row
from benchmarks.serving import stats
from benchmarks.serving.campaign import Measured
from benchmarks.serving.contract import Kind, System
from benchmarks.serving.parts import ALONE, CONTROL, LONGS
from benchmarks.serving.verdict import (
    BUSY,
    STALL_S,
    cost,
    itl_p50,
    itl_p99,
    long_ttft,
    stalled,
    tokens,
)
from benchmarks.serving.window import Window


@dataclass(frozen=True, slots=True)
class Column:
    """Of a table: the median of `what` over the windows with one of these labels."""

    name: str
    unit: str
    what: Callable[[Window], float]
    labels: tuple[str, ...]


def _short_ttft(share: float) -> Callable[[Window], float]:
    return lambda w: 1e3 * _at(stats.ttfts(w.answers, Kind.SHORT), share)


def _long_ttft_p99(window: Window) -> float:
    return 1e3 * _at(stats.ttfts(window.answers, Kind.LONG), 0.99)


def _at(values: Sequence[float], share: float) -> float:
    found = stats.spread(values)
    return found.p50 if share == 0.5 else found.p99


def _lag_p99(window: Window) -> float:
    return 1e3 * stats.spread(window.result.lag_s).p99


def _load_share(window: Window) -> float:
    return 100 * window.result.cpu_s / window.result.took_s


COLUMNS = (
    Column("ITL p50, control", "ms", itl_p50, (CONTROL,)),
    Column("ITL p99, control", "ms", itl_p99, (CONTROL,)),
    Column("ITL p50, longs", "ms", itl_p50, (LONGS,)),
    Column("ITL p99, longs", "ms", itl_p99, (LONGS,)),
    Column(f"time in gaps > {1e3 * STALL_S:g} ms, longs", "%", stalled, (LONGS,)),
    Column("tokens/s, control", "1/s", tokens, (CONTROL,)),
    Column("tokens/s, longs", "1/s", tokens, (LONGS,)),
    Column("short TTFT p50, longs", "ms", _short_ttft(0.5), (LONGS,)),
    Column("short TTFT p99, longs", "ms", _short_ttft(0.99), (LONGS,)),
    Column("long TTFT p50", "ms", long_ttft, (LONGS, ALONE)),
    Column("long TTFT p99", "ms", _long_ttft_p99, (LONGS, ALONE)),
    Column("CPU per request, longs", "ms", cost, (LONGS,)),
    Column("load generator CPU", "% of one core", _load_share, (LONGS,)),
    Column("load generator late, p99", "ms", _lag_p99, (LONGS,)),
)


def rows(measured: Measured) -> list[Row]:
    """Everything per system: informs, holds nothing."""
    found = []
    for system in measured.systems:
        name = system.name
        if ready := measured.ready_s.get(name):
            found.append(row(f"{name}: ready after", median(ready), "s"))
        if (idle := measured.idle_cores(name)) is not None:
            found.append(row(f"{name}: idle CPU", 100 * idle, "% of one core"))
        for column in COLUMNS:
            windows, value = _median(measured, system, column)
            if value is not None:
                mark = "" if all(w.quiet for w in windows) else BUSY
                found.append(row(f"{name}: {column.name}{mark}", value, column.unit))
    return found


def _median(
    measured: Measured, system: System, column: Column
) -> tuple[list[Window], float | None]:
    windows = [
        w for label in column.labels for w in measured.of(system.name, "interference", label)
    ]
    values = [v for v in map(column.what, windows) if v == v]
    return windows, median(values) if values else None


def markdown(measured: Measured) -> str:
    """What follows the rows: systems and tables."""
    systems = measured.systems
    parts = ["## Systems", *(f"- **{s.name}**: {s.note}" for s in systems)]
    parts += ["", "## Interference, side by side", interference(measured)]
    return "\n".join(parts) + "\n"


def interference(measured: Measured) -> str:
    lines = []
    for system in measured.systems:
        values = [_median(measured, system, column)[1] for column in COLUMNS]
        if any(v is not None for v in values):
            lines.append([system.name, *map(_cell, values)])
    return grid(["system", *(f"{c.name} {c.unit}".strip() for c in COLUMNS)], lines)


def grid(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A markdown table; a sentence where there is nothing to show."""
    listed = list(lines)
    if not listed:
        return "Not measured in this run."
    rows_ = [head, ["---"] * len(head), *listed]
    return "\n".join("| " + " | ".join(line) + " |" for line in rows_)


def _cell(value: float | None) -> str:
    return (
        ""
        if value is None or value != value
        else f"{value:.3g}"
        if value < 1000
        else f"{value:.0f}"
    )
