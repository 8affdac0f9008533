"""Lines of the format `json`: one object each, whoever wrote them."""

from __future__ import annotations

import json
import subprocess
import sys

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
