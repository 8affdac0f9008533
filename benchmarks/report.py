"""What every benchmark leaves behind: its rows, as a markdown table in results/NAME.md.

`quiet` tells a reader whether to believe the numbers: it is False when anything but the measured
processes used the CPU meanwhile (see `machine.OtherLoad`).
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks import machine

RESULTS = Path(__file__).parent / "results"
HEAD = "| metric | value | unit | peer | peer value | ratio | target | ok |"


class Row(msgspec.Struct, kw_only=True):
    """One measured number. `ratio`: value divided by peer_value. `target`: `<= 5` or the like,
    about the ratio if there is a peer, else about the value; "" if the row only informs. No
    `value`: it could not be measured here, `unit` says why."""

    metric: str
    value: float | None
    unit: str
    peer: str = ""
    peer_value: float | None = None
    ratio: float | None = None
    target: str = ""
    ok: bool = True


def row(
    metric: str,
    value: float,
    unit: str,
    at_most: float | None = None,
    at_least: float | None = None,
) -> Row:
    """A row that is held against a limit, or only informs."""
    target, ok = _held(value, at_most, at_least)
    return Row(metric=metric, value=_short(value), unit=unit, target=target, ok=ok)


def none_of(metric: str, count: int, of: int = 0) -> Row:
    """A count that must be zero. of: how many there were; 0: there is no such number."""
    unit = f"of {of}" if of else ""
    return Row(metric=metric, value=count, unit=unit, target="0", ok=count == 0)


def versus(
    metric: str,
    value: float,
    unit: str,
    peer: str,
    peer_value: float,
    at_most: float | None = None,
    at_least: float | None = None,
) -> Row:
    """A row that compares with `peer`, measured in the same run; the limit is the ratio's."""
    ratio = value / peer_value
    target, ok = _held(ratio, at_most, at_least)
    return Row(
        metric=metric,
        value=_short(value),
        unit=unit,
        peer=peer,
        peer_value=_short(peer_value),
        ratio=_short(ratio),
        target=target and f"ratio {target}",
        ok=ok,
    )


def missing(metric: str, peer: str, why: str) -> Row:
    """A row that could not be measured here: says so, and fails nothing."""
    return Row(metric=metric, value=None, unit=f"not measured: {why}", peer=peer)


def _held(value: float, at_most: float | None, at_least: float | None) -> tuple[str, bool]:
    if at_most is not None:
        return f"<= {at_most:g}", value <= at_most
    if at_least is not None:
        return f">= {at_least:g}", value >= at_least
    return "", True


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest; `share` in [0, 1]. Raises ValueError without values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


median = statistics.median


def table(rows: Sequence[Row]) -> str:
    """The rows in markdown."""
    lines = [HEAD, "|---" * 8 + "|"]
    for r in rows:
        value, peer_value, ratio = (
            "" if number is None else f"{number:g}" for number in (r.value, r.peer_value, r.ratio)
        )
        verdict = "" if not r.target else "yes" if r.ok else "NO"
        lines.append(
            f"| {r.metric} | {value} | {r.unit} | {r.peer} | {peer_value} | {ratio} "
            f"| {r.target} | {verdict} |"
        )
    return "\n".join(lines)


def finish(
    name: str,
    rows: list[Row],
    *,
    quiet: bool,
    save: bool,
    title: str,
    more: str = "",
    even_if_busy: bool = False,
) -> int:
    """Print the table, write the file if `save`. Returns 0 if every row is ok, else 1.

    If the machine was not quiet, nothing is written, and the status is 1. With even_if_busy the
    file is written and marked, and only the rows decide about the status."""
    shown, below = table(rows), _below(quiet)
    print(f"\n{shown}\n\n{below}")
    believed = quiet or even_if_busy
    if save and believed:
        write(name, rows, quiet=quiet, title=title, more=more)
    elif save:
        print(f"results/{name}.md not written: measure again when nobody uses the machine")
    return 0 if believed and all(r.ok for r in rows) else 1


def write(name: str, rows: list[Row], *, quiet: bool, title: str, more: str = "") -> None:
    """Write results/NAME.md. more: markdown that follows the table."""
    RESULTS.mkdir(exist_ok=True)
    text = f"# {title}\n\n{table(rows)}\n\nCommit {_below(quiet)}.\n"
    text += more and f"\n{more.rstrip()}\n"
    (RESULTS / f"{name}.md").write_text(text)


def _below(quiet: bool) -> str:
    state = "quiet" if quiet else "NOT quiet: others used the CPU while it was measured"
    return f"{_commit()}; {_machine()}; {state}"


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _commit() -> str:
    git = ["git", "-C", str(RESULTS.parent)]
    head = _output([*git, "rev-parse", "--short", "HEAD"])
    dirty = _output(
        [*git, "status", "--porcelain", "--untracked-files=no", "--", "..", ":!results"]
    )
    return (head or "unknown") + ("+changes" if dirty else "")


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _machine() -> str:
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip() + ", "
            break
    slow = "" if machine.multiplies_bfloat16() else " without bfloat16"
    return f"{model}{os.cpu_count()} cores{slow}, {platform.machine()}, Linux {platform.release()}"
