"""Logging: one line per event on stderr, `time level role name: message`. Without logins in URLs.

With the format `json` each line is an object: `timestamp`, `level`, `logger`, `message`, `role`,
`pid`, `instance_id`, the ids of what it is about (`request_id`, `job_id`, `attempt`, ...), and
`exc_info`. Then lines of vLLM and other libraries have this form, too.

A task tells the ids of its further lines with `about`. A single line gets them as
`extra=log.ids(...)`. The text format leaves ids to the message.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from pullfill import redact
from pullfill.clock import SYSTEM_CLOCK
from pullfill.errors import ConfigError

LEVEL_ENV = "PULLFILL_LOG_LEVEL"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
DEBUG_ENV = "PULLFILL_DEBUG"
_KEYS = 256


Id = str | int
_about: ContextVar[Mapping[str, Id]] = ContextVar("about", default=MappingProxyType({}))
_process: dict[str, Id] = {}


def about(**ids: Id) -> None:
    """Add these ids to all further lines of this asyncio task, in the format `json`."""
    _about.set({**_about.get(), **ids})


def ids(**ids: Id) -> dict[str, Any]:
    """Return `extra` for one line with these ids."""
    return {"ids": ids}


def identify(instance_id: str) -> None:
    """Add the id of this process to all further lines, in the format `json`."""
    _process["instance_id"] = instance_id


def setup(role: str, *, as_json: bool = False) -> None:
    """Configure the `pullfill` logger of this process. Idempotent. In the text format vLLM's
    logging stays as it is.

    Raises ConfigError for an unknown level."""
    logger = logging.getLogger("pullfill")
    wanted = os.environ.get(LEVEL_ENV) or "INFO"
    try:
        logger.setLevel(wanted.upper())
    except ValueError:
        names = ", ".join(LEVELS)
        raise ConfigError(f"{LEVEL_ENV}={wanted!r}: use one of {names}") from None
    logger.propagate = False
    if as_json:
        _setup_json(role, logger)
    elif not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_OneLine(f"%(asctime)s %(levelname).1s {role} %(name)s: %(message)s"))
        logger.addHandler(handler)


class _OneLine(logging.Formatter):
    """Escapes what is not printable. Tracebacks keep their lines."""

    # Clients choose the ids of their requests, and must neither write lines of their own nor move
    # the cursor of a reader.

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _escaped(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return redact.text(super().format(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(_escaped, super().formatException(ei).split("\n")))


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _setup_json(role: str, logger: logging.Logger) -> None:
    # Only those who want this format need the library.
    from pythonjsonlogger.msgspec import MsgspecFormatter

    class Formatter(MsgspecFormatter):
        def format(self, record: logging.LogRecord) -> str:
            return redact.text(super().format(record))

    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_add_ids)
    handler.setFormatter(
        Formatter(
            ["levelname", "name", "message"],
            timestamp=True,
            rename_fields={"levelname": "level", "name": "logger"},
        )
    )
    _process.update(role=role, pid=os.getpid())
    # Children of vLLM, one for each rank, configure their own logging: they must not.
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    vllm = logging.getLogger("vllm")
    vllm.setLevel(os.environ.get("VLLM_LOGGING_LEVEL") or "WARNING")
    vllm.handlers, vllm.propagate = [], True
    logging.getLogger().handlers = [handler]
    logging.captureWarnings(True)
    logger.handlers = [handler]


def _add_ids(record: logging.LogRecord) -> bool:
    """Make the ids attributes of the record, from which the formatter takes them."""
    record.__dict__.update({**_process, **_about.get(), **record.__dict__.pop("ids", {})})
    return True


def complain(error: BaseException, text: str = "") -> None:
    """Print `error: ...` on stderr, and before it the traceback if PULLFILL_DEBUG is set.

    text: the message. Empty: that of `error`."""
    if os.environ.get(DEBUG_ENV):
        traceback.print_exception(error)
    if "role" in _process:
        logging.getLogger("pullfill").error("%s", text or error)
    else:
        print(redact.text(f"error: {text or error}"), file=sys.stderr)


class _Logger(logging.Logger):
    """A logger that `logging.disable` does not silence."""

    # vLLM calls it on the engine thread while it reads its flags. It is for the whole process, so
    # lines of other threads were lost.

    def isEnabledFor(self, level: int) -> bool:
        return not self.disabled and level >= self.getEffectiveLevel()


def get(name: str) -> logging.Logger:
    """The logger of one room, e.g. `get("decode_worker.ledger")`."""
    logger = logging.getLogger(f"pullfill.{name}")
    logger.__class__ = _Logger
    return logger


class Seldom:
    """Limits what others can make us log: each key once in `every_s` seconds.

    Remembers the last 256 keys. For one thread."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._seen: dict[str, tuple[float, int]] = {}

    def due(self, key: str) -> str | None:
        """Return None if the line must not be logged now. Otherwise return its end.

        That says how many such lines were left out."""
        now = SYSTEM_CLOCK.monotonic()
        until, kept = self._seen.pop(key, (now, 0))
        if now < until:
            self._seen[key] = (until, kept + 1)
            return None
        self._seen[key] = (now + self._every_s, 0)
        if len(self._seen) > _KEYS:
            del self._seen[next(iter(self._seen))]
        return f" ({kept} more since the last such line)" if kept else ""
