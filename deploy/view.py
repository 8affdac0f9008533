"""Shows what the processes of `up` and `down` do: a live table, or lines where no terminal is."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

# Columns of a log.
_LOG_WIDTH = 200
_BEGINNINGS = ("waiting", "starting", "draining", "stopping")
_STYLES = {
    "waiting": "dim",
    "starting": "yellow",
    "ready": "green",
    "draining": "yellow",
    "stopping": "yellow",
    "stopped": "dim",
    "killed": "red",
    "failed": "bold red",
}


def plain(text: str) -> str:
    """Return the text without what could move the cursor or colour the terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


class SteadyConsole(Console):
    """A console that does not end the process when nobody reads its output any more."""

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):
            super().on_broken_pipe()


@dataclass(slots=True)
class _Row:
    """took: seconds from the beginning to this state. None: this state is a beginning."""

    state: str
    since: float
    note: str = ""
    took: float | None = None


@dataclass(slots=True)
class ProcessView:
    """The states of processes, by name. The table is shown within `with`."""

    console: Console
    title: str
    _rows: dict[str, _Row] = field(default_factory=dict)
    _live: Live | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(
                get_renderable=self._table, console=self.console, refresh_per_second=4
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def named(self, title: str) -> Self:
        """Give the table another title."""
        self.title = title
        return self

    def to_log(self) -> None:
        """Write lines for a log from now on: standard output is one."""
        self.console = SteadyConsole(width=_LOG_WIDTH)

    def set(self, name: str, state: str, note: str = "") -> None:
        """Show that the process `name` is now `state`. Where there is no table, print a line."""
        now = time.monotonic()
        row = self._rows.get(name)
        if row is not None and (row.state, row.note) == (state, note):
            return
        begins = state in _BEGINNINGS
        since = now if row is None or begins else row.since
        took = None if begins else now - since
        self._rows[name] = _Row(state, since, note, took)
        if self._live is None:
            seconds = f" after {took:.1f} s" if took is not None and row is not None else ""
            tail = f"  {note}" if note else ""
            self._print(Text(f"{name:<12} {state}{seconds}{tail}"))

    def say(self, text: str, style: str = "") -> None:
        """Print a line, above the table if there is one."""
        self._print(Text(text, style=style), soft_wrap=True)

    def _print(self, text: Text, *, soft_wrap: bool = False) -> None:
        # The log of a supervisor may be on a full disk. Its processes are kept all the same.
        with suppress(OSError):
            self.console.print(text, soft_wrap=soft_wrap)

    def _table(self) -> Table:
        table = Table(title=self.title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for column in ("process", "state", "seconds", ""):
            table.add_column(column, justify="right" if column == "seconds" else "left")
        now = time.monotonic()
        for name, row in self._rows.items():
            seconds = row.took if row.took is not None else now - row.since
            state = Text(row.state, style=_STYLES.get(row.state, ""))
            table.add_row(name, state, f"{seconds:.1f}", Text(row.note, style="dim"))
        return table
