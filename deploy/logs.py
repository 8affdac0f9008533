"""`pullfill logs`: prints the logs of a local cluster, and follows them.

`up` appends the output of each process to `STATE/logs/NAME.log`. So logs are there also when the
cluster runs no more. A file that is cut is read again from its beginning. A new `up` puts another
file in the place of one: then that is followed.
"""

from __future__ import annotations

import difflib
import io
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import typer

from pullfill.deploy.state import StateDir
from pullfill.errors import ConfigError

_BLOCK = 1 << 16


def show(state_dir: str | None, name: str | None, *, lines: int, follow: bool) -> int:
    """Print the last lines of the logs. Return the exit code.

    name: of a process, like `decode-0`; a role, for all of it; or an instance id. None: all.
    lines: of each process. follow: go on until the user stops it."""
    state = StateDir(state_dir)
    files = chosen(state, name)
    width = max(map(len, files)) if len(files) > 1 else 0
    tails = [_Tail(label, path, width) for label, path in sorted(files.items())]
    try:
        for tail in tails:
            tail.show_last(lines)
        while follow:
            time.sleep(0.2)
            if name is None:
                tails += _new(state, tails, width)
            for tail in tails:
                tail.show_more()
            for tail in tails:
                tail.follow_name()
    except KeyboardInterrupt:
        pass  # how a user ends --follow
    finally:
        for tail in tails:
            tail.close()
    return 0


def chosen(state: StateDir, name: str | None) -> dict[str, Path]:
    """Return the log files that `name` means, by the names of their processes.

    Raises ConfigError if there are none."""
    files = {path.stem: path for path in state.logs.glob("*.log")}
    if not files:
        raise ConfigError(
            f"{state.logs} has no logs: name the --state-dir of a cluster of `pullfill up`"
        )
    if name is None or name in files:
        return files if name is None else {name: files[name]}
    cluster = state.cluster()
    entries = cluster.processes if cluster else []
    found = {e.name for e in entries if name in (e.instance_id, e.role)}
    found |= {known for known in files if known.rpartition("-")[0] == name}
    if found := found & files.keys():
        return {known: files[known] for known in found}
    near = difflib.get_close_matches(name, files, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"no process is called {name!r}: there are {', '.join(sorted(files))}{hint}")


def _new(state: StateDir, tails: Sequence[_Tail], width: int) -> list[_Tail]:
    """Return those of processes whose files are new."""
    known = {tail.path for tail in tails}
    return [_Tail(p.stem, p, width) for p in sorted(state.logs.glob("*.log")) if p not in known]


@dataclass(slots=True)
class _Tail:
    """One log file. width: of the column of names. 0: there is none."""

    label: str
    path: Path
    width: int
    _file: BinaryIO | None = None
    _rest: bytes = b""

    def show_last(self, count: int) -> None:
        """Print the last lines that are there."""
        if (file := self._open()) is None:
            return
        at, data = file.seek(0, io.SEEK_END), b""
        while at and data.count(b"\n") <= count:
            start = max(0, at - _BLOCK)
            file.seek(start)
            data, at = file.read(at - start) + data, start
        whole, _, self._rest = data.rpartition(b"\n")
        file.seek(0, io.SEEK_END)
        if count and data:
            self._print(whole.split(b"\n")[-count:] if whole else [])

    def show_more(self) -> None:
        """Print what was added."""
        if (file := self._open()) is None:
            return
        if os.fstat(file.fileno()).st_size < file.tell():
            file.seek(0)
            self._rest = b""
        for data in self._read(file):
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._print(lines)

    def close(self) -> None:
        """Print a last line that has no end, and close the file."""
        if self._rest:
            self._print([self._rest])
        if self._file is not None:
            self._file.close()
        self._file, self._rest = None, b""

    def follow_name(self) -> None:
        """Turn to the file that has the name now."""
        with suppress(FileNotFoundError):
            now = self.path.stat()
            if self._file is not None and not os.path.samestat(now, os.fstat(self._file.fileno())):
                self.show_more()
                self.close()

    def _open(self) -> BinaryIO | None:
        if self._file is None and self.path.exists():
            self._file = self.path.open("rb")
        return self._file

    def _read(self, file: BinaryIO) -> Iterator[bytes]:
        while data := file.read(_BLOCK):
            yield data

    def _print(self, lines: Sequence[bytes]) -> None:
        label = f"{self.label:{self.width}} | " if self.width else ""
        for line in lines:
            typer.echo(label + line.decode("utf-8", "replace"))
