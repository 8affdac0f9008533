"""Logging: one line per event on stderr, `time level role name: message`."""

from __future__ import annotations

import logging
import os
import sys
import traceback

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.errors import ConfigError

LEVEL_ENV = "PULLFILL_LOG_LEVEL"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
DEBUG_ENV = "PULLFILL_DEBUG"
_KEYS = 256


def setup(role: str, level: str | None = None) -> None:
    """Configure the `pullfill` logger of this process. Idempotent. Does not change vLLM's logging.

    Raises ConfigError for an unknown level."""
    logger = logging.getLogger("pullfill")
    wanted = level or os.environ.get(LEVEL_ENV) or "INFO"
    try:
        logger.setLevel(wanted.upper())
    except ValueError:
        names = ", ".join(LEVELS)
        raise ConfigError(f"{LEVEL_ENV}={wanted!r}: use one of {names}") from None
    logger.propagate = False
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s %(levelname).1s {role} %(name)s: %(message)s")
        )
        logger.addHandler(handler)


def complain(error: BaseException, text: str = "") -> None:
    """Print `error: ...` on stderr, and before it the traceback if PULLFILL_DEBUG is set.

    text: the message. Empty: that of `error`."""
    if os.environ.get(DEBUG_ENV):
        traceback.print_exception(error)
    print(f"error: {text or error}", file=sys.stderr)


def get(name: str) -> logging.Logger:
    """The logger of one room, e.g. `get("decode_worker.ledger")`."""
    return logging.getLogger(f"pullfill.{name}")


class Seldom:
    """Limits what others can make us log: each key once in `every_s` seconds.

    Remembers the last 256 keys. For one thread."""

    def __init__(self, every_s: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._every_s = every_s
        self._clock = clock
        self._seen: dict[str, tuple[float, int]] = {}

    def due(self, key: str) -> str | None:
        """Return None if the line must not be logged now. Otherwise return its end.

        That says how many such lines were left out."""
        now = self._clock.monotonic()
        until, kept = self._seen.pop(key, (now, 0))
        if now < until:
            self._seen[key] = (until, kept + 1)
            return None
        self._seen[key] = (now + self._every_s, 0)
        if len(self._seen) > _KEYS:
            del self._seen[next(iter(self._seen))]
        return f" ({kept} more since the last such line)" if kept else ""
