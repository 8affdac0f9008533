"""Named points where tests make a fault happen at an exact moment.

Off unless `PULLFILL_FAILPOINTS` is set before start, e.g.
`prefill.before_claim=kill;prefill.after_write=stop@2;decode.before_grant=sleep:0.5`.

`PULLFILL_FAILPOINTS=@FILE` reads the same text from a file, again whenever the file is replaced, so
that a test can arm a process that runs already; a missing file means none.

Actions: `kill` (SIGKILL to this process), `stop` (SIGSTOP), `sleep:SECONDS`, `hold` (wait until the
file no longer says so), `error:TEXT` (raises `FailpointError`), `corrupt` (at points that follow a
copy: one byte arrives wrong). `kill@N` acts on the N-th hit only (1-based), and a line in the log
says so. Cost when off: one look at an empty dict.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from pullfill.errors import ConfigError
from pullfill.runtime import log

logger = log.get("failpoints")
ENV = "PULLFILL_FAILPOINTS"
VERBS = ("kill", "stop", "sleep", "hold", "error", "corrupt")
HOLD_LOOKS_EVERY_S = 0.01


class FailpointError(RuntimeError):
    """Raised by an `error:TEXT` failpoint."""


@dataclass(slots=True)
class _Action:
    verb: str
    argument: str
    on_hit: int
    hits: int = 0


def parse(spec: str) -> dict[str, _Action]:
    """Parse the environment's form. Raises ConfigError on anything unknown."""
    actions: dict[str, _Action] = {}
    for item in filter(None, (part.strip() for part in spec.split(";"))):
        name, _, action = item.partition("=")
        action, _, nth = action.partition("@")
        verb, _, argument = action.partition(":")
        if verb not in VERBS or (nth and not nth.isdigit()):
            raise ConfigError(
                f"{ENV}: cannot read {item!r}; use NAME={'|'.join(VERBS)}[@N], sleep:SECONDS, "
                "error:TEXT"
            )
        actions[name] = _Action(verb, argument, int(nth or 0))
    return actions


class _File:
    """The file form: `refresh` parses it anew when another inode or time shows that it changed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None

    def refresh(self) -> None:
        global _active
        try:
            now = os.stat(self._path)
        except FileNotFoundError:
            seen = None
        else:
            seen = (now.st_ino, now.st_mtime_ns)
        with _lock:
            if seen == self._seen:
                return
            self._seen = seen
            _active = parse(Path(self._path).read_text()) if seen is not None else {}


_lock = threading.Lock()
_spec = os.environ.get(ENV, "")
_file = _File(_spec[1:]) if _spec.startswith("@") else None
_active: dict[str, _Action] = {} if _file is not None else parse(_spec)


def armed() -> bool:
    """Whether any failpoint is set."""
    if _file is not None:
        _file.refresh()
    return bool(_active)


def hit(name: str) -> bool:
    """Do what the environment asks for at this point; nothing when it asks for nothing. True: the
    caller is to change a byte of what it just moved."""
    if _file is not None:
        _file.refresh()
    if not _active:
        return False
    with _lock:
        action = _active.get(name)
        if action is None:
            return False
        action.hits += 1
        if action.on_hit and action.hits != action.on_hit:
            return False
    if action.on_hit:
        logger.warning("failpoint %s acts: %s", name, action.verb)
    if action.verb == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action.verb == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.1)  # another thread may take the signal: stay at this point until it acts
    elif action.verb == "sleep":
        time.sleep(float(action.argument))
    elif action.verb == "hold":
        while _active.get(name) is action:
            time.sleep(HOLD_LOOKS_EVERY_S)
            armed()
    elif action.verb == "error":
        raise FailpointError(action.argument or name)
    return action.verb == "corrupt"
