"""The same numbers side by side: one line per system. Rows for the file, tables for readers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.report import Row, median, row
from benchmarks.serving import stats
from benchmarks.serving.campaign import Measured
from benchmarks.serving.contract import Kind, System
from benchmarks.serving.parts import ALONE, CONTROL, LONGS
from benchmarks.serving.stats import Slo
from benchmarks.serving.verdict import (
    BUSY,
    STALL_S,
    cost,
    itl_max,
    itl_p50,
    itl_p99,
    long_ttft,
    stalled,
    tokens,
)
from benchmarks.serving.window import Window

SLO = Slo(ttft_s=1.0, itl_s=0.05)


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
    Column("ITL max, control", "ms", itl_max, (CONTROL,)),
    Column("ITL p50, longs", "ms", itl_p50, (LONGS,)),
    Column("ITL p99, longs", "ms", itl_p99, (LONGS,)),
    Column("ITL max, longs", "ms", itl_max, (LONGS,)),
    Column(f"time in gaps > {1e3 * STALL_S:g} ms, longs", "%", stalled, (LONGS,)),
    Column("tokens/s, control", "1/s", tokens, (CONTROL,)),
    Column("tokens/s, longs", "1/s", tokens, (LONGS,)),
    Column("short TTFT p50, longs", "ms", _short_ttft(0.5), (LONGS,)),
    Column("short TTFT p99, longs", "ms", _short_ttft(0.99), (LONGS,)),
    Column("long TTFT p50", "ms", long_ttft, (LONGS, ALONE)),
    Column("long TTFT p99", "ms", _long_ttft_p99, (LONGS, ALONE)),
    Column("CPU per request, longs", "ms", cost, (LONGS,)),
    Column("tokens per arrival, longs", "", lambda w: stats.together(w.answers), (LONGS,)),
    Column("load generator CPU", "% of one core", _load_share, (LONGS,)),
    Column("load generator late, p99", "ms", _lag_p99, (LONGS,)),
)


def rows(measured: Measured, slo: Slo = SLO) -> list[Row]:
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
        found += _rate_rows(measured, name, slo)
    return found


def _median(
    measured: Measured, system: System, column: Column
) -> tuple[list[Window], float | None]:
    windows = [
        w for label in column.labels for w in measured.of(system.name, "interference", label)
    ]
    values = [v for v in map(column.what, windows) if v == v]
    return windows, median(values) if values else None


def rate_points(measured: Measured, system: str, slo: Slo) -> list[tuple[float, float, float]]:
    """(requests per second, good ones per second, their share), medians over the repeats."""
    points = []
    for label in measured.labels(system, "rates"):
        both = [
            stats.goodput(w.answers, w.length_s, slo) for w in measured.of(system, "rates", label)
        ]
        points.append((float(label), median([g for g, _ in both]), median([s for _, s in both])))
    return sorted(points)


def _rate_rows(measured: Measured, system: str, slo: Slo) -> list[Row]:
    return [
        row(f"{system}: goodput at {rate:g} requests/s", good, f"1/s ({100 * share:.0f} % good)")
        for rate, good, share in rate_points(measured, system, slo)
    ]


def markdown(measured: Measured, plots: Iterable[str], slo: Slo = SLO) -> str:
    """What follows the rows: systems, tables, pictures."""
    systems = measured.systems
    parts = ["## Systems", *(f"- **{s.name}**: {s.note}" for s in systems)]
    parts += ["", "## Interference, side by side", interference(measured)]
    parts += ["", "## CPU by process while longs came, % of one core", processes(measured)]
    parts += ["", "## One long prompt alone: TTFT p50, ms", solo(measured)]
    parts += ["", "## Stages of remote prefills, median ms by prompt length", stages(measured)]
    parts += ["", "## Bursts of long prompts", bursts(measured)]
    parts += ["", f"## Goodput: TTFT <= {1e3 * slo.ttft_s:g} ms, ITL p99 of the request <= "
              f"{1e3 * slo.itl_s:g} ms", rates(measured, slo)]  # fmt: skip
    parts += ["", *(f"![{name}]({name})" for name in plots)]
    return "\n".join(parts) + "\n"


def interference(measured: Measured) -> str:
    lines = []
    for system in measured.systems:
        values = [_median(measured, system, column)[1] for column in COLUMNS]
        if any(v is not None for v in values):
            lines.append([system.name, *map(_cell, values)])
    return grid(["system", *(f"{c.name} {c.unit}".strip() for c in COLUMNS)], lines)


def processes(measured: Measured) -> str:
    lines = []
    for system in measured.systems:
        windows = measured.of(system.name, "interference", LONGS)
        names = dict.fromkeys(name for w in windows for name in w.use.cpu_s)
        shares = {
            name: 100 * median([w.use.cpu_s.get(name, 0.0) / w.use.took_s for w in windows])
            for name in names
        }
        if shares:
            text = ", ".join(f"{name} {share:.1f}" for name, share in shares.items())
            idle = measured.idle_cores(system.name)
            lines.append([system.name, text, _cell(None if idle is None else 100 * idle)])
    return grid(["system", "with longs", "all, idle"], lines)


def solo(measured: Measured) -> str:
    lengths: dict[int, None] = {}
    found: dict[str, dict[int, list[float]]] = {}
    for window in measured.windows:
        if window.part == "solo":
            line = found.setdefault(f"{window.system} {window.label}".strip(), {})
            for answer in stats.good(window.answers):
                length = len(answer.ask.prompt)
                lengths[length] = None
                line.setdefault(length, []).append(1e3 * stats.ttft(answer))
    columns = sorted(lengths)
    lines = [
        [name, *(_cell(median(by[c]) if c in by else None) for c in columns)]
        for name, by in found.items()
    ]
    return grid(["system", *(f"{c} tokens" for c in columns)], lines)


def stages(measured: Measured) -> str:
    """What the frontend says about the prompts of `solo` that were prefilled remotely."""
    found: dict[int, dict[str, list[float]]] = {}
    for window in measured.windows:
        for answer in stats.good(window.answers) if window.part == "solo" else ():
            told = window.explained.get(answer.request_id, {})
            if told.get("path") == "remote":
                line = found.setdefault(len(answer.ask.prompt), {})
                for stage, took in told["timings_ms"].items():
                    if took is not None:
                        line.setdefault(stage, []).append(took)
    names = list(dict.fromkeys(stage for line in found.values() for stage in line))
    lines = [
        [str(length), *(_cell(median(line[n]) if n in line else None) for n in names)]
        for length, line in sorted(found.items())
    ]
    return grid(["tokens", *names], lines)


def bursts(measured: Measured) -> str:
    lines = []
    for system in measured.systems:
        windows = measured.of(system.name, "bursts")
        if windows:
            whats = (long_ttft, _long_ttft_p99, itl_p99, tokens)
            values = (median([what(w) for w in windows]) for what in whats)
            lines.append([system.name, *map(_cell, values)])
    head = ["system", "long TTFT p50 ms", "long TTFT p99 ms", "ITL p99 ms", "tokens/s"]
    return grid(head, lines)


def rates(measured: Measured, slo: Slo) -> str:
    lines = []
    for system in measured.systems:
        points = rate_points(measured, system.name, slo)
        lines += [
            [system.name, f"{rate:g}", _cell(good), f"{100 * share:.0f} %"]
            for rate, good, share in points
        ]
    return grid(["system", "requests/s", "good/s", "share"], lines)


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
