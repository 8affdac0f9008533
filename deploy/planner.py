"""`pullfill plan`: asks the cluster, and prints how many workers are right (pullfill/needs.py)."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pullfill.config import ClusterRef
from pullfill.deploy.members import AsJson
from pullfill.deploy.status import ask
from pullfill.errors import PullfillError, UnavailableError
from pullfill.needs import Plan, PlanSettings, observe, plan
from pullfill.options import Flag
from pullfill.runtime.log import complain


def show(
    ref: ClusterRef,
    settings: PlanSettings,
    *,
    as_json: AsJson = False,
    watch_s: Annotated[float, Flag("Look again every S seconds", metavar="S", least=0)] = 0.0,
) -> int:
    """Print the plan, once or until interrupted. Return the exit code.

    Raises PullfillError if the first look fails, e.g. because no decode worker tells its demand."""
    console, looked = Console(), False
    while True:
        try:
            found = look(ref, settings)
        except PullfillError as exc:
            if not looked:
                raise
            complain(exc)
        else:
            looked = True
            if as_json:
                print(json.dumps(told(found)), flush=True)
            else:
                console.print(shown(found))
        if not watch_s:
            return 0
        time.sleep(watch_s)


def look(ref: ClusterRef, settings: PlanSettings) -> Plan:
    """Ask the cluster, and plan."""
    seen = observe(ask(ref))
    if not seen.demands:
        raise UnavailableError(
            "no decode worker says how much it has to do: see `pullfill status`, or start one with "
            "`pullfill decode`"
        )
    return plan(seen, settings)


def told(found: Plan) -> dict[str, Any]:
    """Return the plan for JSON."""
    result: dict[str, Any] = {"backlog_s": found.backlog_s, "missed": found.missed}
    for need in map(asdict, found.needs):
        result[need.pop("kind")] = need
    return result


def shown(found: Plan) -> Table:
    """Return a table with a line for each kind of worker."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("kind", "now", "needed", "right", "why"):
        table.add_column(column, justify="left" if column in ("kind", "why") else "right")
    for need in found.needs:
        right = Text(str(need.right), style="" if need.right == need.now else "yellow")
        table.add_row(need.kind, str(need.now), f"{need.need:.2f}", right, need.why)
    return table
