"""What every benchmark leaves behind: results/NAME.json and the same rows as a markdown table.

design.md §5 fixes the fields. `quiet` tells a reader whether to believe the numbers: it is False
when anything but the measured processes used the CPU meanwhile (see `machine.Quiet`).
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

RESULTS = Path(__file__).parent / "results"


class Row(msgspec.Struct, kw_only=True):
    """One measured number. `ratio`: value divided by peer_value. `target`: `<= 5` or the like,
    about the ratio if there is a peer, else about the value; "" if the row only informs."""

    metric: str
    value: float
    unit: str
    peer: str = ""
    peer_value: float | None = None
    ratio: float | None = None
    target: str = ""
    ok: bool = True


class Results(msgspec.Struct):
    """The file."""

    commit: str
    machine: str
    quiet: bool
    rows: list[Row]


def row(metric: str, value: float, unit: str, at_most: float | None = None) -> Row:
    """A row that is held against an upper limit, or only informs."""
    if at_most is None:
        return Row(metric=metric, value=_short(value), unit=unit)
    return Row(
        metric=metric,
        value=_short(value),
        unit=unit,
        target=f"<= {at_most:g}",
        ok=value <= at_most,
    )


def versus(
    metric: str, value: float, unit: str, peer: str, peer_value: float, at_most: float | None = None
) -> Row:
    """A row that compares with `peer`, measured in the same run."""
    ratio = value / peer_value
    return Row(
        metric=metric,
        value=_short(value),
        unit=unit,
        peer=peer,
        peer_value=_short(peer_value),
        ratio=_short(ratio),
        target="" if at_most is None else f"ratio <= {at_most:g}",
        ok=at_most is None or ratio <= at_most,
    )


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
    lines = [
        "| metric | value | unit | peer | peer value | ratio | target | ok |",
        "|---" * 8 + "|",
    ]
    for r in rows:
        peer_value = "" if r.peer_value is None else f"{r.peer_value:g}"
        ratio = "" if r.ratio is None else f"{r.ratio:g}"
        verdict = "" if not r.target else "yes" if r.ok else "NO"
        lines.append(
            f"| {r.metric} | {r.value:g} | {r.unit} | {r.peer} | {peer_value} | {ratio} "
            f"| {r.target} | {verdict} |"
        )
    return "\n".join(lines)


def finish(name: str, rows: list[Row], *, quiet: bool, save: bool, title: str) -> int:
    """Print the table, write both files if `save`. Returns 0 if every row is ok, else 1."""
    shown, below = table(rows), _below(quiet)
    print(f"\n{shown}\n\n{below}")
    if save:
        write(name, rows, quiet=quiet, title=title)
    return 0 if all(r.ok for r in rows) else 1


def write(name: str, rows: list[Row], *, quiet: bool, title: str) -> None:
    """Both files."""
    RESULTS.mkdir(exist_ok=True)
    results = Results(_commit(), _machine(), quiet, rows)
    encoded = msgspec.json.format(msgspec.json.encode(results), indent=2)
    (RESULTS / f"{name}.json").write_bytes(encoded + b"\n")
    text = f"# {title}\n\n{table(rows)}\n\nCommit {_below(quiet)}.\n"
    (RESULTS / f"{name}.md").write_text(text)


def _below(quiet: bool) -> str:
    state = "quiet" if quiet else "NOT quiet: others used the CPU while it was measured"
    return f"{_commit()}; {_machine()}; {state}"


def read_rows(name: str) -> list[Row]:
    """What the last saved run measured; [] if there is none."""
    file = RESULTS / f"{name}.json"
    return msgspec.json.decode(file.read_bytes(), type=Results).rows if file.exists() else []


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
    return f"{model}{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}"
