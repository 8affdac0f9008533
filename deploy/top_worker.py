"""What the live page shows of one worker, for `pullfill top INSTANCE_ID`. Fits 80 columns."""

from __future__ import annotations

from difflib import get_close_matches

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pullfill.deploy.top_view import (
    Seen,
    count,
    event,
    head,
    history,
    percent,
    seconds,
    sparks,
    state,
)
from pullfill.deploy.view import plain
from pullfill.errors import ConfigError
from pullfill.snapshot import Snapshot, WorkerPoint, WorkerRow


def check(snapshot: Snapshot, instance_id: str) -> None:
    """Raises ConfigError if no worker of this name is there, or was."""
    known = {row.instance_id for row in snapshot.workers}
    known |= {name for point in snapshot.points for name in point.workers}
    if instance_id in known:
        return
    near = get_close_matches(instance_id, sorted(known), n=1)
    there = f"did you mean {near[0]}?" if near else f"there are: {', '.join(sorted(known)) or '-'}"
    raise ConfigError(f"no worker is called {instance_id!r}: {there}")


def screen(seen: Seen, instance_id: str, trouble: str = "") -> Group:
    """Return what to show. trouble: why there is nothing new."""
    snapshot = seen.snapshot
    if snapshot is None:
        return Group(Text(trouble or "waiting for the first snapshot", style="yellow"))
    rows = [row for row in snapshot.workers if row.instance_id == instance_id]
    parts: list[RenderableType] = [head(snapshot, trouble), Text(plain(instance_id), style="bold")]
    parts += [_about(row) for row in rows] or [Text("this worker has left", style="yellow")]
    line = [point and point.workers.get(instance_id) for point in history(seen.points, snapshot.at)]
    known = [one or WorkerPoint() for one in line]
    parts.append(
        sparks(
            {
                "KV use": ([one.kv for one in known], percent),
                "running": ([one.running for one in known], count),
                "waiting": ([one.waiting for one in known], count),
                "tokens/s": ([one.tokens_per_s for one in known], count),
            }
        )
    )
    parts += [event(mark) for mark in reversed(snapshot.marks) if mark.who == instance_id]
    parts += [_load(row) for row in rows]
    return Group(*parts)


def _about(row: WorkerRow) -> Group:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    figures = f"KV {percent(row.kv)}, {count(row.running)} running, {count(row.waiting)} waiting"
    facts: dict[str, str | Text | None] = {
        "role": row.role,
        "state": state(row.state),
        "now": f"{figures}, {count(row.tokens_per_s)} tokens/s",
        "model": row.model,
        "host": f"{row.host}, pid {row.pid}, restarts: {row.restarts}",
        "pressure": None if row.pressure is None else f"{percent(row.pressure)} full",
        "its queue": None if row.backlog_s is None else f"{seconds(row.backlog_s)} of work",
    }
    for name, value in facts.items():
        if value is not None:
            table.add_row(name, value if isinstance(value, Text) else Text(plain(value)))
    return Group(*(Text(plain(line), style="yellow") for line in row.troubles), table)


def _load(row: WorkerRow) -> Text:
    told = (
        f"{name}={count(value) if isinstance(value, int | float) else value}"
        for name, value in row.load.items()
        if isinstance(value, int | float | str)
    )
    return Text(plain("load: " + " ".join(told)), style="dim")
