"""NCCL's settings as NCCL reads them (NCCL's manual, "Environment Variables").

Places, in this order. The first that has a setting counts:

- the environment
- the file that `NCCL_CONF_FILE` names; if that is not set, `.nccl.conf` in the home directory
- `/etc/nccl.conf`

A line of a file is `NAME=VALUE`, without spaces around the `=`. Plugins that set NCCL's environment
(`NCCL_ENV_PLUGIN`) are not asked.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from pathlib import Path

SYSTEM = Path("/etc/nccl.conf")


def setting(name: str) -> tuple[str, str]:
    """The value of a setting, and where it is set, for people. Both are empty if it is not set."""
    if (value := os.environ.get(name)) is not None:
        return value.strip(), "the environment"
    for path in _files():
        try:
            lines = path.read_text(errors="replace").split("\n")
        except OSError:  # NCCL too goes on without it
            continue
        for line in lines:
            key, equals, value = line.partition("=")
            if equals and key == name:
                return value.strip(), str(path)
    return "", ""


def _files() -> Iterator[Path]:
    if named := os.environ.get("NCCL_CONF_FILE"):
        yield Path(named)
    else:
        # NCCL 2.30 asks HOME, older releases the user database.
        for home in dict.fromkeys((os.environ.get("HOME"), _home_of_user())):
            if home:
                yield Path(home, ".nccl.conf")
    yield SYSTEM


def _home_of_user() -> str | None:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a container's user without an entry
        return None
