"""Lines of the format `json`: one object each, whoever wrote them. Real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

BEGIN = """
import asyncio, logging, sys, warnings
from pullfill.runtime import log
log.setup("prefill", "INFO", as_json=True)
log.identify("prefill-1")
logger = log.get("room.part")
"""


def lines(code: str) -> list[dict[str, Any]]:
    """What a process says on stderr. Each line must be an object."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code], capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_a_line_says_who_and_about_what() -> None:
    (line,) = lines('logger.warning("job %s", "j", extra=log.ids(job_id="j", attempt=2))')
    assert line.pop("timestamp")
    assert line.pop("pid") > 0
    assert line == {
        "level": "WARNING", "logger": "pullfill.room.part", "message": "job j", "role": "prefill",
        "instance_id": "prefill-1", "job_id": "j", "attempt": 2,
    }  # fmt: skip


def test_a_task_tells_its_ids_once_and_keeps_them_to_itself() -> None:
    found = lines(
        """
async def work(job):
    log.about(job_id=job)
    await asyncio.sleep(0)
    log.about(attempt=1)
    logger.info("x", extra=log.ids(request_id="r"))
async def main():
    await asyncio.gather(*(asyncio.create_task(work(job)) for job in "ab"))
    logger.info("none")
asyncio.run(main())
"""
    )
    told = [{k: line.get(k) for k in ("job_id", "attempt", "request_id")} for line in found]
    assert told == [
        {"job_id": "a", "attempt": 1, "request_id": "r"},
        {"job_id": "b", "attempt": 1, "request_id": "r"},
        {"job_id": None, "attempt": None, "request_id": None},
    ]


def test_a_traceback_a_warning_and_another_library_are_one_line_each() -> None:
    found = lines(
        """
try:
    1 / 0
except ZeroDivisionError:
    logger.exception("no good")
logging.getLogger("vllm.x").info("not shown")
logging.getLogger("vllm.x").warning("from\\nvLLM")
logging.getLogger("uvicorn.error").error("from uvicorn")
warnings.warn("careful")
log.complain(ValueError("the end of http://u:s3cr3t@h:1"))
"""
    )
    assert [line["level"] for line in found] == ["ERROR", "WARNING", "ERROR", "WARNING", "ERROR"]
    assert "ZeroDivisionError" in found[0]["exc_info"]
    assert found[1]["message"] == "from\nvLLM"
    assert found[1]["logger"] == "vllm.x"
    assert found[2]["logger"] == "uvicorn.error"
    assert "careful" in found[3]["message"]
    assert found[4]["message"] == "the end of http://h:1"
    assert all(line["instance_id"] == "prefill-1" for line in found)
