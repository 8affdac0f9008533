"""What the fault benchmarks print: rows for the result files, one table for the documentation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.chaos_release import Released
from benchmarks.chaos_scenarios import Run
from benchmarks.report import Row, measured, percentile, row

DOC = Path(__file__).parent / "README.md"
PEER = "queue-based Dynamo, published"
PUBLISHED = {"prefill": 2.0, "decode": 600.0, "frontend": 136.0}
"""Of 800 requests, how many failed when one process of the role was killed."""
PUBLISHED_BACK_S = {"prefill": 42.0}
BACK_LIMIT_S = 2.0
FREE_LIMIT_S = 1.0
ERROR_LIMIT_S = 5.0
PARTS = ("before", "during", "after")
WRITERS = "writers killed while they wrote"


def none_of(metric: str, count: int, of: int = 0, peer_value: float | None = None) -> Row:
    """A count that must be zero. of: how many there were; 0: there is no such number."""
    return Row(
        metric=metric,
        value=count,
        unit=f"of {of}" if of else "",
        peer=PEER if peer_value is not None else "",
        peer_value=peer_value,
        target="0",
        ok=count == 0,
    )


def report_rows(topology: str, run: Run) -> list[Row]:
    """Everything one scenario showed."""
    name, victim, total = f"{topology}, {run.scenario.title}", run.scenario.victim, len(run.asks)
    rows = [none_of(f"{name}: failed", len(run.unexpected), total, PUBLISHED.get(victim))]
    if victim == "frontend":
        own = len(run.failed) - len(run.unexpected)
        rows.append(row(f"{name}: open there when it was killed", len(run.excused), "requests"))
        rows.append(row(f"{name}: of them failed", own, "requests"))
        rows.append(row(f"{name}: turned to the other", run.turned_away, "times"))
    rows.append(none_of(f"{name}: wrong answers", len(run.wrong), total))
    rows.append(none_of(f"{name}: blocks or jobs left behind", int(bool(run.left))))
    if run.scenario.outage:
        met = len(run.failed) - len(run.unexpected)
        rows.append(row(f"{name}: failed while there was none", met, f"of {total}"))
        rows.append(row(f"{name}: slowest error", run.slowest_error_s, "s", ERROR_LIMIT_S))
        if run.restarted_s is not None:
            rows.append(row(f"{name}: another one ready after", run.restarted_s, "s"))
    if run.noticed_s is not None:
        rows.append(row(f"{name}: noticed after", 1000 * run.noticed_s, "ms"))
    rows += _recovery_rows(name, run)
    for part in PARTS:
        rate = run.rate(part)
        if rate is not None and (part == "before" or victim):
            rows.append(row(f"{name}: {part}", rate, "tokens/s"))
    if victim and not run.scenario.outage:
        rows.append(row(f"{name}: what is left can do", run.wanted, "tokens/s"))
    if victim:
        rows.append(row(f"{name}: longest silence after the kill", run.gap_s, "s"))
        rows.append(row(f"{name}: prefilled remotely after it", 100 * run.remote_after, "%"))
        rows.append(row(f"{name}: continued at another decode worker", run.continued, "answers"))
    rows.append(row(f"{name}: prefilled remotely", 100 * run.remote_before, "%"))
    for kind, values in (("duration", run.durations), ("first token", run.first_tokens)):
        rows.append(row(f"{name}: {kind}, p50", 1000 * percentile(values, 0.5), "ms"))
        rows.append(row(f"{name}: {kind}, p99", 1000 * percentile(values, 0.99), "ms"))
    return rows


def _recovery_rows(name: str, run: Run) -> list[Row]:
    rows: list[Row] = []
    if not run.scenario.victim or run.scenario.outage:
        return rows
    back = run.back_s
    never = run.ended - (run.killed or 0.0)
    found = row(f"{name}: throughput back after", never if back is None else back, "s")
    found.target, found.ok = f"<= {BACK_LIMIT_S:g}", back is not None and back <= BACK_LIMIT_S
    if run.scenario.victim in PUBLISHED_BACK_S:
        found.peer, found.peer_value = PEER, PUBLISHED_BACK_S[run.scenario.victim]
    rows.append(found)
    if run.scenario.victim == "prefill":
        freed = 10.0 if run.freed_s is None else run.freed_s
        rows.append(row(f"{name}: its blocks free after", freed, "s", FREE_LIMIT_S))
    elif run.freed_s is not None:
        rows.append(row(f"{name}: its requests aborted after", run.freed_s, "s"))
    return rows


def release_rows(seen: Released, kills: int) -> list[Row]:
    """Of writers killed in the middle of a write."""
    name, total = f"{kills} {WRITERS}", len(seen.asks)
    failed = sum(bool(a.error) for a in seen.asks)
    return [
        row(f"{name}: noticed after, p50", 1000 * percentile(seen.noticed_s, 0.5), "ms"),
        row(f"{name}: blocks free after, p50", 1000 * percentile(seen.free_s, 0.5), "ms"),
        row(
            f"{name}: blocks free after, p99",
            1000 * percentile(seen.free_s, 0.99),
            "ms",
            1000 * FREE_LIMIT_S,
        ),
        none_of(f"{name}: requests failed", failed, total),
        none_of(f"{name}: wrong answers", len(seen.wrong), total),
        none_of(f"{name}: blocks or jobs left behind", int(bool(seen.left))),
    ]


HEAD = (
    "| cluster | what happens | failed | wrong | noticed | blocks free | back after "
    "| tokens/s before, during, after | the rest can do | p50, p99 |\n" + "|---" * 10 + "|\n"
)


def report_table(rows: Sequence[Row]) -> str:
    """One line per scenario, and one sentence about the writers that were killed."""
    groups: dict[str, dict[str, Row]] = {}
    for r in rows:
        name, _, metric = r.metric.partition(": ")
        groups.setdefault(name, {})[metric] = r
    lines = [_line(name, found) for name, found in groups.items() if "duration, p50" in found]
    sentences = [_sentence(name, found) for name, found in groups.items() if WRITERS in name]
    return "\n\n".join([HEAD + "\n".join(lines), *sentences])


def _line(name: str, found: Mapping[str, Row]) -> str:
    def number(metric: str, unit: str = "", digits: int = 0, missing: str = "–") -> str:
        row = found.get(metric)
        return missing if row is None else f"{measured(row):.{digits}f}{unit}"

    topology, _, title = name.partition(", ")
    total = found["failed"].unit.removeprefix("of ")
    count = measured(found["failed"])
    failed = f"{count:g} of {total}"
    if own := found.get("of them failed"):
        open_there = measured(found["open there when it was killed"])
        failed = f"{count + measured(own):g} of {total}, {open_there:g} were open there"
    if met := found.get("failed while there was none"):
        slowest = measured(found["slowest error"])
        failed = f"{count + measured(met):g} of {total}, each within {slowest:.1f} s"
    back = number("throughput back after", " s", 2, number("another one ready after", " s", 1))
    rate = ", ".join(number(part) for part in PARTS)
    took = ", ".join(number(f"duration, {p}", " ms") for p in ("p50", "p99"))
    freed = found.get("its blocks free after")
    free = f"{1000 * measured(freed):.0f} ms" if freed else "–"
    return (
        f"| {topology} | {title} | {failed} | {number('wrong answers')} "
        f"| {number('noticed after', ' ms')} | {free} "
        f"| {back} | {rate} | {number('what is left can do')} | {took} |"
    )


def _sentence(name: str, found: Mapping[str, Row]) -> str:
    p50, p99 = (measured(found[f"blocks free after, {p}"]) for p in ("p50", "p99"))
    failed, wrong = found["requests failed"], found["wrong answers"]
    return (
        f"{name}, one after the other at random moments, one decode worker under load: their "
        f"blocks were free after {p50:.0f} ms (p50), {p99:.0f} ms (p99); {measured(failed):g} "
        f"requests failed meanwhile and {measured(wrong):g} answers were wrong, {wrong.unit}."
    )


def merged(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """`old` with what was measured again replaced, scenario by scenario, and what is new."""
    again = {r.metric.partition(": ")[0] for r in new}
    places = list(dict.fromkeys(r.metric.partition(": ")[0] for r in [*old, *new]))
    rows = [r for r in old if r.metric.partition(": ")[0] not in again] + list(new)
    return sorted(rows, key=lambda r: places.index(r.metric.partition(": ")[0]))


def write_docs(name: str, text: str, page: Path = DOC) -> None:
    """Put `text` between the two comments that name it. Raises ValueError when they are missing."""
    begin, end = f"<!-- {name}: written by the benchmark -->", f"<!-- end of {name} -->"
    page_text = page.read_text()
    found = re.subn(
        f"({re.escape(begin)}\n).*?({re.escape(end)})",
        lambda m: f"{m[1]}\n{text}\n\n{m[2]}",
        page_text,
        flags=re.DOTALL,
    )
    if found[1] != 1:
        raise ValueError(f"{page}: no place for {name}")
    page.write_text(found[0])
