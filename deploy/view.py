"""Tells what the processes of `up` and `down` do: a line for each change of one."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

_BEGINNINGS = ("waiting", "starting", "draining", "stopping")
_STYLES = {"ready": "green", "stopped": "dim", "killed": "red", "failed": "bold red"}


def plain(text: str) -> str:
    """Return the text without what could move the cursor or colour the terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


class SteadyConsole(Console):
    """A console that does not end the process when nobody reads its output any more."""

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):
            super().on_broken_pipe()


@dataclass(slots=True)
class ProcessView:
    """Tells the states of processes. Knows, by name, when the last beginning of each was."""

    console: Console
    _since: dict[str, float] = field(default_factory=dict)

    def set(self, name: str, state: str, note: str = "") -> None:
        """Tell that the process `name` is now `state`, and how long that took."""
        took, begins = "", state in _BEGINNINGS
        if begins:
            self._since[name] = time.monotonic()
        elif name in self._since:
            took = f" after {time.monotonic() - self._since[name]:.1f} s"
        style = _STYLES.get(state, "yellow" if begins else "")
        tail = f"  {note}" if note else ""
        self._print(Text.assemble(f"{name:<12} ", (state, style), f"{took}{tail}"))

    def say(self, text: str, style: str = "") -> None:
        """Print a line."""
        self._print(Text(text, style=style))

    def _print(self, text: Text) -> None:
        # The log of a supervisor may be on a full disk. Its processes are kept all the same.
        with suppress(OSError):
            self.console.print(text, soft_wrap=True)
