"""Log lines: their form, their level, and how often others can make us write one."""

from __future__ import annotations

import io
import json
import logging
import subprocess
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


PROGRAM = """
import asyncio, logging, warnings
from pullfill.runtime import log
log.setup("prefill", as_json=True)
log.identify("prefill-1")
logger = log.get("room.part")
async def work(job):
    log.about(job_id=job)
    await asyncio.sleep(0)
    log.about(attempt=1)
    logger.info("x", extra=log.ids(request_id="r"))
async def main():
    await asyncio.gather(*(asyncio.create_task(work(job)) for job in "ab"))
    logger.info("none")
asyncio.run(main())
try:
    1 / 0
except ZeroDivisionError:
    logger.exception("no good")
logging.getLogger("vllm.x").info("not shown")
logging.getLogger("vllm.x").warning("from\\nvLLM")
warnings.warn("careful")
log.complain(ValueError("the end of http://u:s3cr3t@h:1"))
"""


def test_each_line_says_who_and_about_what() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    a, b, none, failed, vllm, warned, end = map(json.loads, done.stderr.splitlines())
    assert a.pop("timestamp")
    assert a.pop("pid") > 0
    assert a == {
        "level": "INFO", "logger": "pullfill.room.part", "message": "x", "role": "prefill",
        "instance_id": "prefill-1", "job_id": "a", "attempt": 1, "request_id": "r",
    }  # fmt: skip
    assert (b["job_id"], b["attempt"]) == ("b", 1)
    assert not {"job_id", "attempt", "request_id"} & none.keys(), "a task keeps its ids to itself"
    assert "ZeroDivisionError" in failed["exc_info"]
    assert (vllm["level"], vllm["logger"], vllm["message"]) == ("WARNING", "vllm.x", "from\nvLLM")
    assert "careful" in warned["message"]
    assert end["message"] == "the end of http://h:1"
