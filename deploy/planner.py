"""`pullfill plan`: says how many workers of each role are right, and why."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from pullfill.config import ClusterRef
from pullfill.deploy import scaling
from pullfill.deploy.scaling import Plan, Settings, State
from pullfill.deploy.status import ask
from pullfill.errors import UnavailableError


def plan(
    ref: ClusterRef, settings: Settings, *, as_json: bool = False, watch_s: float = 0.0
) -> int:
    """Print the plan. Return the exit code.

    watch_s: look again every so many seconds, until interrupted. 0: once.

    Raises UnavailableError if no decode worker tells its demand."""
    console, state = Console(), State()
    while True:
        found = look(ref, settings, state)
        # Nobody moves the worker, so the same move stays right.
        state = state if found.moves else found.state
        if as_json:
            print(json.dumps(told(found)), flush=True)
        else:
            console.print(shown(found))
        if not watch_s:
            return 0
        time.sleep(watch_s)


def look(ref: ClusterRef, settings: Settings, state: State) -> Plan:
    """Ask the cluster, and plan."""
    seen = scaling.observe(ask(ref), time.monotonic())
    if not seen.demands:
        raise UnavailableError(
            "no decode worker says how much it has to do: see `pullfill status`, or start one with "
            "`pullfill decode`"
        )
    return scaling.plan(seen, state, settings)


def told(found: Plan) -> dict[str, Any]:
    """Return the plan for JSON (docs/wire.md)."""
    roles = {need.role: asdict(need) for need in (found.prefill, found.decode)}
    for need in roles.values():
        del need["role"]
    return {
        **roles,
        "backlog_s": found.backlog_s,
        "missed": found.missed,
        "moves": [
            {"instance_id": move.instance_id, "from": move.before, "to": move.after}
            for move in found.moves
        ],
        "reasons": list(found.reasons),
    }


def shown(found: Plan) -> Group:
    """Return a table with a line for each role, and what to do."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("role", "now", "needed", "right", "why"):
        table.add_column(column, justify="left" if column in ("role", "why") else "right")
    for need in (found.prefill, found.decode):
        style = "" if need.right == need.now else "yellow"
        right = Text(str(need.right), style=style)
        table.add_row(need.role, str(need.now), f"{need.need:.2f}", right, need.why)
    return Group(table, *(Text(f"change of role: {why}") for why in found.reasons))
