"""`pullfill logs`: prints the logs of a local cluster, and follows them, by the program `tail`.

`up` appends the output of each process to `STATE/logs/NAME.log`. So logs are there also when the
cluster runs no more. A new `up` puts another file in the place of one, which `tail -F` notices.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, NoReturn

from pullfill.deploy.state import StateDir
from pullfill.errors import ConfigError
from pullfill.options import Flag


def show(
    state: StateDir,
    name: Annotated[str | None, Flag("", name="[NAME]")] = None,
    follow: Annotated[bool, Flag("Print new lines until Ctrl-C", name="--follow -f")] = False,
    lines: Annotated[
        int, Flag("Last lines of each process", name="--lines -n", metavar="N", least=0)
    ] = 20,
) -> NoReturn:
    """Become the program that prints the last lines of the logs.

    name: of a process, like `decode-0`; a role, for all of it; or an instance id. None: all."""
    follow_too = ["-F"] if follow else []
    command = ["tail", "-n", str(lines), *follow_too, *map(str, chosen(state, name))]
    os.execvp(command[0], command)


def chosen(state: StateDir, name: str | None) -> list[Path]:
    """Return the log files that `name` means. Raises ConfigError if there are none."""
    files = {path.stem: path for path in sorted(state.logs.glob("*.log"))}
    if not files:
        raise ConfigError(
            f"{state.logs} has no logs: name the --state-dir of a cluster of `pullfill up`"
        )
    cluster = state.readable()  # logs are there also if the record is damaged
    entries = cluster.processes if cluster else []
    meant = {entry.name for entry in entries if name in (entry.instance_id, entry.role)}
    found = [
        path
        for known, path in files.items()
        if name in (None, known, known.rpartition("-")[0]) or known in meant
    ]
    if found:
        return found
    raise ConfigError(f"no process is called {name!r}: there are {', '.join(files)}")
