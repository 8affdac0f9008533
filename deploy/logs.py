"""`pullfill logs`: prints the logs of a local cluster with `tail`, and follows them.

`up` appends the output of each process to `STATE/logs/NAME.log`. So logs are there also when the
cluster runs no more. A new `up` puts another file in the place of one: `tail -F` turns to that.
"""

from __future__ import annotations

import difflib
import subprocess
from pathlib import Path
from typing import Annotated

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
) -> int:
    """Print the last lines of the logs. Return the exit code.

    name: of a process, like `decode-0`; a role, for all of it; or an instance id. None: all."""
    command = ["tail", "-n", str(lines), *["-F"] * follow, "--"]
    try:
        return subprocess.run([*command, *chosen(state, name)]).returncode
    except FileNotFoundError:
        raise ConfigError(
            f"no `tail` on this machine: install coreutils, or read the files in {state.logs}"
        ) from None
    except KeyboardInterrupt:
        return 0  # how a user ends --follow


def chosen(state: StateDir, name: str | None) -> list[Path]:
    """Return the log files that `name` means. Raises ConfigError if there are none."""
    files = {path.stem: path for path in sorted(state.logs.glob("*.log"))}
    if not files:
        raise ConfigError(
            f"{state.logs} has no logs: name the --state-dir of a cluster of `pullfill up`"
        )
    cluster = state.cluster()
    entries = cluster.processes if cluster else []
    meant = {entry.name for entry in entries if name in (entry.instance_id, entry.role)}
    found = [
        path
        for known, path in files.items()
        if name in (None, known, known.rpartition("-")[0]) or known in meant
    ]
    if found:
        return found
    near = difflib.get_close_matches(str(name), files, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"no process is called {name!r}: there are {', '.join(files)}{hint}")
