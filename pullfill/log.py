"""Logging: one line per event on stderr, `time level role name: message`."""

from __future__ import annotations

import logging
import os
import sys


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
