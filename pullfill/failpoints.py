"""Named points where tests make a fault happen at an exact moment.

Off unless `PULLFILL_FAILPOINTS` is set before start, e.g.
`prefill.before_claim=kill;prefill.after_write=stop@2;decode.before_grant=sleep:0.5`.

Actions: `kill` (SIGKILL to this process), `stop` (SIGSTOP), `sleep:SECONDS`, `error:TEXT`
(raises `FailpointError`). `kill@N` acts on the N-th hit only (1-based). Cost when off: one
dict lookup on an empty dict.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass

from pullfill.errors import ConfigError

ENV = "PULLFILL_FAILPOINTS"


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
        if verb not in {"kill", "stop", "sleep", "error"} or (nth and not nth.isdigit()):
            raise ConfigError(
                f"{ENV}: cannot read {item!r}; use NAME=kill|stop|sleep:S|error:TEXT[@N]"
            )
        actions[name] = _Action(verb, argument, int(nth or 0))
    return actions


_active: dict[str, _Action] = parse(os.environ.get(ENV, ""))
_lock = threading.Lock()


def hit(name: str) -> None:
    """Do what the environment asks for at this point; nothing when it asks for nothing."""
    if not _active:
        return
    with _lock:
        action = _active.get(name)
        if action is None:
            return
        action.hits += 1
        if action.on_hit and action.hits != action.on_hit:
            return
    if action.verb == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action.verb == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.1)  # another thread may take the signal: stay at this point until it acts
    elif action.verb == "sleep":
        time.sleep(float(action.argument))
    else:
        raise FailpointError(action.argument or name)
