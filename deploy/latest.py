"""`pullfill requests`: the latest requests that have ended, as the live pages list them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pullfill.config import ClusterRef
from pullfill.deploy import top
from pullfill.deploy.top_view import count, ms
from pullfill.deploy.view import plain
from pullfill.snapshot import Ended


def show(ref: ClusterRef, url: str | None, most: int, as_json: bool) -> int:
    """Print requests of all frontends, the latest last.

    url: of the only frontend to ask; None: ask all. most: how many requests to print at most.
    Raises UnavailableError if no frontend answers, ConfigError if each one that
    answers denies access."""
    rows = [row for snapshot in top.first_of_each(ref, url) for row in snapshot.ended]
    # A request without an end was cancelled. Nobody knows when, so it stands first.
    rows = sorted(rows, key=lambda row: row.at or 0.0)[-most:]
    if as_json:
        typer.echo(msgspec.json.encode(rows).decode())
    elif rows:
        Console().print(table(rows), highlight=False)
        typer.echo("✓ TTFT and ITL within router.ttft_ms and router.itl_ms (or its own), ✕ not")
        typer.echo("`pullfill explain REQUEST` shows the stages of one")
    else:
        typer.echo("no request has ended yet")
    return 0


def table(rows: Sequence[Ended]) -> Table:
    """Return a row for each request. Fits 80 columns. Ids are never shortened.

    The sign before the time says whether it was within its targets."""
    found = Table(box=None, padding=(0, 1, 0, 0))
    found.add_column("ended", no_wrap=True)
    found.add_column("request", overflow="fold", min_width=25)
    found.add_column("path", no_wrap=True)
    found.add_column("reason", overflow="fold")
    for name in ("in", "out", "TTFT", "ITL"):
        found.add_column(name, justify="right", no_wrap=True)
    signs = {True: Text("✓ ", style="green"), False: Text("✕ ", style="red"), None: Text("  ")}
    for row in rows:
        ended = time.strftime("%H:%M:%S", time.localtime(row.at)) if row.at else "cancel"
        found.add_row(
            signs[row.good] + ended, Text(plain(row.id)), plain(row.path),
            Text(plain(row.fallback or row.reason)),
            count(row.prompt), count(row.made), ms(row.ttft_ms), ms(row.itl_ms),
        )  # fmt: skip
    return found
