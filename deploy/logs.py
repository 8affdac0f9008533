"""`pullfill logs`: prints the logs of a local cluster, and follows them.

`up` appends the output of each process to `STATE/logs/NAME.log`. So logs are there also when the
cluster runs no more. A new `up` puts another file in the place of one.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from contextlib import suppress
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
    files = chosen(state, name)
    read: dict[Path, tuple[int, int]] = {}  # inode, and how much of the file was printed
    last, tail = files[0] if len(files) == 1 else None, lines
    with suppress(KeyboardInterrupt):  # how a user ends --follow
        while True:
            for path in files:
                # A new `up` takes the files away for a moment.
                with suppress(FileNotFoundError), path.open("rb") as file:
                    now = os.fstat(file.fileno())
                    inode, offset = read.get(path, (now.st_ino, 0))
                    # It may be another file, or be emptied by a tool that rotates logs.
                    file.seek(offset if inode == now.st_ino and offset <= now.st_size else 0)
                    text = b"".join(deque(file, maxlen=tail))
                    read[path] = now.st_ino, file.tell()
                    if text and path != last:
                        print(f"==> {path} <==", flush=True)
                        last = path
                    sys.stdout.buffer.write(text)
            sys.stdout.flush()
            if not follow:
                break
            time.sleep(0.3)
            tail = sys.maxsize  # of what is new, all lines
            with suppress(ConfigError):
                files = chosen(state, name)  # a process may have been started
    return 0


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
    raise ConfigError(f"no process is called {name!r}: there are {', '.join(files)}")
