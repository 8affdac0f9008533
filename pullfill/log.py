"""Logging: one line per event on stderr, `time level role name: message`."""

from __future__ import annotations

import logging
import os
import sys

from pullfill.clock import SYSTEM_CLOCK, Clock

_KEYS = 256


def setup(role: str, level: str | None = None) -> None:
    """Configure the `pullfill` logger of this process. Idempotent; leaves vLLM's logging alone."""
    logger = logging.getLogger("pullfill")
    logger.setLevel((level or os.environ.get("PULLFILL_LOG_LEVEL") or "INFO").upper())
    logger.propagate = False
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s %(levelname).1s {role} %(name)s: %(message)s")
        )
        logger.addHandler(handler)


def get(name: str) -> logging.Logger:
    """The logger of one room, e.g. `get("decode_worker.ledger")`."""
    return logging.getLogger(f"pullfill.{name}")


class Seldom:
    """What somebody else can make us log again and again: each key once in `every_s` seconds. It
    remembers the last 256 keys. One thread."""

    def __init__(self, every_s: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._every_s = every_s
        self._clock = clock
        self._seen: dict[str, tuple[float, int]] = {}

    def due(self, key: str) -> str | None:
        """None: not now. Else log it, with this at the end: how often it was kept quiet."""
        now = self._clock.monotonic()
        until, kept = self._seen.pop(key, (now, 0))
        if now < until:
            self._seen[key] = (until, kept + 1)
            return None
        self._seen[key] = (now + self._every_s, 0)
        if len(self._seen) > _KEYS:
            del self._seen[next(iter(self._seen))]
        return f" ({kept} more since the last such line)" if kept else ""
