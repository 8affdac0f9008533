"""Named points where tests make a fault happen at an exact moment.

Off unless `PULLFILL_FAILPOINTS` is set before start, e.g.
`prefill.before_claim=kill;prefill.after_write=stop@2;decode.before_grant=sleep:0.5`.

`PULLFILL_FAILPOINTS=@FILE` reads the same text from a file, again each time the file is replaced.
So a test can arm a process that already runs. A missing file means none.

Actions: `kill` (SIGKILL to this process), `stop` (SIGSTOP), `sleep:SECONDS`, `hold` (wait until the
file no longer says so), `error:TEXT` (raises `FailpointError`). `kill@N` acts on the N-th hit only,
and logs it. The first hit is 1.
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
VERBS = ("kill", "stop", "sleep", "hold", "error")


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


_lock = threading.Lock()
_spec = os.environ.get(ENV, "")
_file = _spec[1:] if _spec.startswith("@") else ""
_active = {} if _file else parse(_spec)
_seen: tuple[int, int] | None = None


def armed() -> bool:
    """Whether any failpoint is set."""
    if _file:
        _read_again()
    return bool(_active)


def _read_again() -> None:
    """Parse the file, if another inode or time shows that it has changed."""
    global _active, _seen
    try:
        now = os.stat(_file)
        seen = now.st_ino, now.st_mtime_ns
    except FileNotFoundError:
        seen = None
    with _lock:
        if seen != _seen:
            _seen = seen
            _active = parse(Path(_file).read_text()) if seen is not None else {}


def hit(name: str) -> None:
    """Do what is asked for at this point."""
    if _file:
        _read_again()
    if not _active:
        return
    with _lock:
        action = _active.get(name)
        if action is None:
            return
        action.hits += 1
        if action.on_hit and action.hits != action.on_hit:
            return
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
            time.sleep(0.01)
            armed()
    elif action.verb == "error":
        raise FailpointError(action.argument or name)
