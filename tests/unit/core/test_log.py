"""Log lines: their form, their level, and how often others can make us write one."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator

import pytest

from pullfill.runtime import log


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What the process writes on stderr. Its logger is set up anew."""
    logger, stream = logging.getLogger("pullfill"), io.StringIO()
    level = logger.level
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(sys, "stderr", stream)
    log.setup("decode")
    log.setup("decode")
    yield stream
    logger.setLevel(level)


def test_a_line_without_logins(said: io.StringIO) -> None:
    log.get("room.part").info("hello %d from %s", 1, "http://u:s3cr3t@h/x@y")
    log.get("room.part").debug("not shown")
    (line,) = said.getvalue().splitlines()
    assert line.endswith("I decode pullfill.room.part: hello 1 from http://h/x@y")


def test_a_line_stays_one_line_whatever_clients_call_their_requests(said: io.StringIO) -> None:
    odd = "x\n2026-01-01 E frontend: all is lost\r\x1b[2J\u2028é"
    try:
        raise ValueError(odd)
    except ValueError:
        log.get("room").exception("request %s failed", odd)
    first, *trace = said.getvalue().split("\n")
    assert first.endswith(r"request x\n2026-01-01 E frontend: all is lost\r\x1b[2J\u2028é failed")
    assert trace[0].startswith("Traceback")
    assert "\x1b" not in said.getvalue()
